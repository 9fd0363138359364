"""vLLM's own code loads heads written by Outrider. Run with scripts/test -m vllm where vLLM is installed.

vLLM pins its own torch: to use it from another environment, give its Python in VLLM_PYTHON.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_folder import make_folder

from outrider.heads import eagle_formats, medusa
from outrider.runner import ModelRunner, RunnerConfig
from outrider.train import shapes

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed")]
VOCAB, DRAFT_VOCAB = 320, 64


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_folder(
        tmp_path_factory.mktemp("target"), hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runner(target):
    return ModelRunner.load(target, RunnerConfig(compile="never", device="cpu"))


def loaded_by_vllm(target: Path, head: Path, method: str, tokens: int, out: Path) -> dict[str, torch.Tensor]:
    """Return vLLM's parameters by name. For Medusa it builds as many heads as there are tokens to draft."""
    script = Path(__file__).with_name("vllm_load.py")
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [str(PYTHON), str(script), str(target), str(head), method, str(tokens), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


@pytest.mark.parametrize("kind", ["native", "speculators"])
@pytest.mark.parametrize("is_reduced", [True, False])
def test_vllm_loads_an_exported_eagle3_head(kind, is_reduced, target, runner, tmp_path):
    draft_ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values if is_reduced else None
    head = shapes.new_eagle(runner, 3, (2, 3, 4), draft_ids)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    eagle_formats.export(head, tmp_path / "head", kind, verifier=str(target))
    held = loaded_by_vllm(target, tmp_path / "head", "eagle3", 2, tmp_path / "held.safetensors")
    assert bytes(held["tag"].tolist()) == b"Eagle3LlamaForCausalLM"
    own = head.state_dict()
    attention = [own[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(held["model.layers.0.self_attn.qkv_proj.weight"], torch.cat(attention))
    names = ("fc.weight", "norm.weight", "layers.0.hidden_norm.weight", "layers.0.mlp.down_proj.weight")
    for name in names:
        assert torch.equal(held[f"model.{name}"], own[name]), name
    rows = DRAFT_VOCAB if is_reduced else VOCAB
    assert torch.equal(held["lm_head.weight"][:rows], own["lm_head.weight"])
    if draft_ids is not None:
        assert torch.equal(held["draft_id_to_target_id"] + torch.arange(DRAFT_VOCAB), draft_ids)


def test_vllm_loads_exported_medusa_heads(target, runner, tmp_path):
    heads = shapes.new_medusa(runner, 3, 1)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    medusa.export(heads, tmp_path / "heads", VOCAB)
    held = loaded_by_vllm(target, tmp_path / "heads", "medusa", 3, tmp_path / "held.safetensors")
    for name, tensor in heads.state_dict().items():
        assert torch.equal(held[name][: len(tensor)], tensor), name
