"""vLLM's own code loads heads written by Outrider. Run with scripts/test -m vllm where vLLM is installed.

vLLM pins its own torch: to use it from another environment, give its Python in VLLM_PYTHON.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_folder import make_folder

from outrider.heads import block_formats, eagle_formats, medusa, mtp_formats
from outrider.runner import ModelRunner, RunnerConfig
from outrider.train import shapes

from .mtp_checkpoints import tiny_target

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed")]
VOCAB, DRAFT_VOCAB = 320, 64
STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_folder(
        tmp_path_factory.mktemp("target"), hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runner(target):
    return ModelRunner.load(target, RunnerConfig(compile="never", device="cpu"))


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module


def loaded_by_vllm(target: Path, head: Path, method: str, tokens: int, out: Path) -> dict[str, torch.Tensor]:
    """Return vLLM's parameters by name. For Medusa it builds as many heads as there are tokens to draft."""
    script = Path(__file__).with_name("vllm_load.py")
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [str(PYTHON), str(script), str(target), str(head), method, str(tokens), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


def parts_of(name: str, own: dict[str, torch.Tensor]) -> list[str] | None:
    """Return the file's tensors that vLLM stacks in a parameter; None if there is just one."""
    for stack, parts in STACKS.items():
        if f".{stack}." in name:
            return [name.replace(stack, part) for part in parts]
    stem, _, stack = name.rpartition(".experts.")
    if not stem:
        return None
    matrices = ("gate_proj", "up_proj") if stack == "w13_weight" else ("down_proj",)
    count = sum(f"{stem}.experts.{expert}.down_proj.weight" in own for expert in range(len(own)))
    return [f"{stem}.experts.{expert}.{matrix}.weight" for expert in range(count) for matrix in matrices]


def check_parameters(
    held: dict[str, torch.Tensor], folder: Path, kind: str, *shared: str, unread: tuple[str, ...] = ()
) -> None:
    """Compare every parameter of vLLM with the file, and check that nothing else is in it than ``unread``.

    ``shared``: those that the file does not hold, because vLLM takes them from the target.
    """
    assert bytes(held.pop("tag").tolist()).decode() == kind
    own = {re.sub(r"^(mtp|model)\.", "", name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    own = {name.replace("midlayer.", "layers.0.").replace("d2t", "draft_id_to_target_id"): own[name] for name in own}
    left = set(own) - set(unread)
    for name, tensor in held.items():
        if name in shared:
            assert tensor.isnan().any(), name
            continue
        plain = re.sub(r"^model\.|mtp_block\.|routed_experts\.", "", name)
        parts = parts_of(plain, own) or [plain]
        wanted = torch.cat([own[part] for part in parts])
        assert torch.equal(tensor.flatten(0, -2)[: len(wanted)] if tensor.dim() > 1 else tensor, wanted), name
        left -= set(parts)
    assert not left


@pytest.mark.parametrize("kind", ["native", "speculators"])
@pytest.mark.parametrize("is_reduced", [True, False])
def test_vllm_loads_an_exported_eagle3_head(kind, is_reduced, target, runner, tmp_path):
    draft_ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values if is_reduced else None
    head = randomised(shapes.new_eagle(runner, 3, (2, 3, 4), draft_ids))
    eagle_formats.export(head, tmp_path / "head", kind, verifier=str(target))
    held = loaded_by_vllm(target, tmp_path / "head", "eagle3", 2, tmp_path / "held.safetensors")
    shared = ("model.embed_tokens.weight",) if kind == "native" else ()
    check_parameters(held, tmp_path / "head", "Eagle3LlamaForCausalLM", *shared, unread=("t2d",))


def test_vllm_loads_an_exported_eagle1_head(target, runner, tmp_path):
    eagle_formats.export(randomised(shapes.new_eagle(runner, 1, (6,), None)), tmp_path / "head")
    held = loaded_by_vllm(target, tmp_path / "head", "eagle", 2, tmp_path / "held.safetensors")
    check_parameters(held, tmp_path / "head", "EagleLlamaForCausalLM", unread=("fc.bias",))  # zeros


def test_vllm_loads_exported_medusa_heads(target, runner, tmp_path):
    medusa.export(randomised(shapes.new_medusa(runner, 3, 1)), tmp_path / "heads", VOCAB)
    held = loaded_by_vllm(target, tmp_path / "heads", "medusa", 3, tmp_path / "held.safetensors")
    check_parameters(held, tmp_path / "heads", "Medusa")


def test_vllm_loads_an_exported_block_drafter(target, runner, tmp_path):
    """For DSpark and DFlash 2 it needs its newer model runner, which needs a GPU."""
    head = randomised(shapes.new_block(runner, shapes.BlockSizes((2, 4), 2, 6), 319))
    block_formats.export(head, tmp_path / "head", 6)
    held = loaded_by_vllm(target, tmp_path / "head", "dflash", 3, tmp_path / "held.safetensors")
    shared = ("lm_head.weight", "model.embed_tokens.weight", "model.mask_embedding")  # the last one is not used
    check_parameters(held, tmp_path / "head", "DFlashQwen3ForCausalLM", *shared)


@pytest.mark.parametrize(
    ("family", "layout", "kind", "output"),
    [
        ("qwen3_next", "qwen", "Qwen3NextMTP", "lm_head.weight"),
        ("glm4_moe", "deepseek", "Glm4MoeMTP", "model.layers.2.shared_head.head.weight"),
        ("deepseek_v3", "deepseek", "DeepSeekMTP", "model.layers.2.shared_head.head.weight"),
    ],
)
def test_vllm_loads_an_exported_mtp_head(family, layout, kind, output, tmp_path):
    options = {"topk_method": "noaux_tc"} if family == "deepseek_v3" else {}  # as published
    tiny_target(family, **options).save_pretrained(tmp_path / "target")
    runner = ModelRunner.load(str(tmp_path / "target"), RunnerConfig(compile="never", device="cpu"))
    mtp_formats.export(randomised(shapes.new_mtp(runner)), tmp_path / "head", layout)
    held = loaded_by_vllm(tmp_path / "target", tmp_path / "head", "mtp", 1, tmp_path / "held.safetensors")
    check_parameters(held, tmp_path / "head", kind, "model.embed_tokens.weight", output)
