"""Fuse ``activation(gate) * up`` of an exported pass into the linear layer that computes both.

Inductor would run it as a separate single-threaded loop over the layer's output, which in prefill takes half of the layer's
time. Matching on the exported graph makes it independent of module names.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram

from outrider.runner import kernels

aten, ops = torch.ops.aten, torch.ops.outrider


def fuse_gates(program: ExportedProgram) -> None:
    """Rewrite the graph in place."""
    graph = program.graph_module.graph
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        fused = _gated(product)
        if fused is None:
            continue
        activation, chain = fused
        with graph.inserting_before(product):
            x, packed, _, _, activation_bits = chain[-1].args
            node = graph.call_function(ops.linear_gated.default, (x, packed, activation, activation_bits))
        node.meta.update(product.meta)
        product.replace_all_uses_with(node)
        for old in (product, *chain):
            graph.erase_node(old)
    program.graph_module.recompile()


def _gated(product: Any) -> tuple[str, list[Any]] | None:
    """Return the activation and the nodes from a gated product to its linear layer; None for other products."""
    for gate, up in (product.args, product.args[::-1]):
        activation = _activation(gate)
        if activation is None or not _is_half(gate.args[0], 0) or not _is_half(up, 1):
            continue
        half, split = gate.args[0], up.args[0]
        layer = split.args[0]
        if half.args[0] is not split or not _is_whole(layer) or len(split.users) != 2:
            continue
        if all(len(node.users) == 1 for node in (gate, half, up, layer)):
            return activation, [gate, half, up, split, layer]
    return None


def _activation(node: Any) -> str | None:
    """Return the kernel's name of an activation call."""
    target = getattr(node, "target", None)
    if target is ops.activate.default:
        return str(node.args[1])
    return "silu" if target is aten.silu.default else None  # models that call it themselves


def _is_half(node: Any, index: int) -> bool:
    """Return whether a node is the given half of the last dimension."""
    if getattr(node, "target", None) is not operator.getitem or node.args[1] != index:
        return False
    split = node.args[0]
    halves, whole = [part.shape[-1] for part in split.meta["val"]], split.args[0].meta["val"].shape[-1]
    return len(halves) == 2 and halves[0] == halves[1] and sum(halves) == whole


def _is_whole(layer: Any) -> bool:
    """Return whether a node is a linear layer without bias whose halves consist of whole panels."""
    if getattr(layer, "target", None) is not ops.linear.default:
        return False
    bias, outputs = layer.args[2:4]
    return bias is None and outputs % (2 * kernels.PANEL) == 0
