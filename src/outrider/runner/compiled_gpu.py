"""Programs of a GPU, compiled by inductor: Triton kernels that fuse what stands between the matrix products and attention.

Shapes are dynamic, so that one file serves all passes; graphs.py then captures each shape. Weights are inputs.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from outrider.runner.forward import Program
from outrider.runner.graphs import Run
from outrider.runner.linear import is_plain


def suits(model: nn.Module) -> bool:
    """Return whether a model's programs can be exported: experts are chosen by values that only the GPU knows."""
    has_experts = any("experts" in name for name, _ in model.named_parameters())
    return find_spec("triton") is not None and is_plain(model) and not has_experts


def build(exported: ExportedProgram, to: Path) -> None:
    """Compile a program into one file."""
    graph, inputs = exported.graph_module, exported.graph_signature.input_specs
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]  # where inductor looks for the dynamic shapes
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "artifact"
        torch._inductor.standalone_compile(graph, examples).save(path=str(compiled))
        parts = {
            "names": [spec.target for spec in inputs if spec.kind is not InputKind.USER_INPUT],
            "constants": {name: tensor for name, tensor in exported.constants.items() if isinstance(tensor, Tensor)},
            "artifact": torch.frombuffer(bytearray(compiled.read_bytes()), dtype=torch.uint8),
        }
    torch.save(parts, to)


def load(program: Program, path: Path) -> Run:
    """Return the compiled form of a program; it takes a list of the program's inputs."""
    from torch._inductor.standalone_compile import CompiledArtifact  # inductor takes long to import

    parts = torch.load(path, weights_only=True)
    with tempfile.TemporaryDirectory() as folder:  # inductor loads only from a file
        compiled = Path(folder) / "artifact"
        compiled.write_bytes(parts["artifact"].numpy().tobytes())
        run = CompiledArtifact.load(path=str(compiled))
    tensors = parts["constants"] | program.weights()
    weights = [tensors[name] for name in parts["names"]]
    return lambda inputs: run(*weights, *[each.contiguous() for each in inputs])
