"""A head inflated with its target drafts the same tokens as the original."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from heads.writers import FFN, HIDDEN, write_eagle1, write_eagle3, write_medusa, write_speculators, write_vllm_medusa
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder
from toy import outputs_of

from outrider import LLM, SamplingParams
from outrider.bench.inflate import inflate
from outrider.bench.inflate_heads import inflate_head, inflated_head
from outrider.bench.shapes import Shape
from outrider.heads import block_formats, mtp_formats
from outrider.heads.checkpoint import EAGLE, MEDUSA, MODEL, MTP, kind_of
from outrider.heads.mtp import MtpHead
from outrider.runner import ModelRunner, RunnerConfig
from outrider.train import shapes
from outrider.types import OutriderError

VOCAB, DRAFT_VOCAB, LAYERS = 320, 90, 4
PROMPTS = [list(range(5, 40)), [7, 8, 9] * 4]
SHAPES = {
    "four times as wide": Shape(hidden=4 * HIDDEN, layers=7, heads=16, kv_heads=4, ffn=2 * FFN),
    "16 times as wide": Shape(hidden=16 * HIDDEN, layers=6, heads=8, kv_heads=2, ffn=FFN + 8),
}
KINDS = ["medusa", "medusa of two layers", "vllm", "eagle1", "eagle1 of two layers"]
KINDS += ["eagle3", "norm_before_fc", "fc_norm", "3.1", "mtp", "dflash", "dspark", "dflash2"]
BLOCKS = {"dflash": {}, "dspark": {"markov_rank": 3}, "dflash2": {"selector_rank": 3}}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Create a small target and inflated versions, by name."""
    folder = tmp_path_factory.mktemp("family")
    small = make_folder(
        folder / "small", hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, tie_word_embeddings=False,
        rms_norm_eps=1e-5, max_position_embeddings=2048,
    )  # fmt: skip
    return {"small": small} | {name: inflate(small, folder / name, shape) for name, shape in SHAPES.items()}


def write(kind: str, folder: Path) -> None:
    if kind.startswith("medusa"):
        write_medusa(folder, VOCAB, 3, layers=2 if "two" in kind else 1)
    elif kind == "vllm":
        write_vllm_medusa(folder, VOCAB, 3, map_to=DRAFT_VOCAB)
    elif kind.startswith("eagle1"):
        write_eagle1(folder, VOCAB, layers=2 if "two" in kind else 1)
    elif kind == "eagle3":
        write_eagle3(folder, VOCAB, DRAFT_VOCAB)
    else:
        write_speculators(folder, VOCAB, DRAFT_VOCAB, extra=kind if kind != "3.1" else "", norm_output=kind == "3.1")


def write_new(kind: str, folder: Path, target: Path) -> None:
    """Write an MTP head or a block drafter for a target, with random weights."""
    runner = ModelRunner.load(target, RunnerConfig(device="cpu", compile="never"))
    sizes = shapes.BlockSizes((1, 3), 2, 4, **BLOCKS.get(kind, {}))
    torch.manual_seed(4)
    head = shapes.new_mtp(runner) if kind == "mtp" else shapes.new_block(runner, sizes, VOCAB - 1)
    for parameter in head.parameters():
        with torch.no_grad():
            parameter += 0.2 * torch.randn_like(parameter)
    if isinstance(head, MtpHead):
        mtp_formats.export(head, folder)
    else:
        block_formats.export(head, folder, LAYERS)


def drafted(target: Path, head: Path) -> list[object]:
    """Every proposal of greedy and of sampled generations, and their texts."""
    kind = kind_of(head)
    assert kind is not None
    method = kind.name + (":max_nodes=6" if kind in (MEDUSA, EAGLE, MTP) else "")  # not what pays: the two cost differently
    llm = LLM(str(target), draft=str(head), method=method, num_draft_tokens=4, compile="never", device="cpu")
    seen: list[object] = []
    propose = llm.proposer.propose

    def spy(context, k):
        proposal = propose(context, k)
        parents = None if proposal.parents is None else proposal.parents.tolist()
        seen.append((proposal.lens.tolist(), proposal.token_ids.tolist(), parents))
        return proposal

    llm.proposer.propose = spy  # type: ignore[method-assign]
    for temperature in (0.0, 1.0):
        before = len(seen)
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
        texts = [completion.token_ids for completion in outputs_of(llm.generate(PROMPTS, params))]
        assert llm.stats.faults == 0 and any(any(lens) for lens, _, _ in seen[before:])
        seen.append(texts)
    return seen


@pytest.fixture(scope="module")
def small_head(family, tmp_path_factory):
    """Return ``small_head(kind)`` -> its folder and its proposals for the small target."""

    @cache
    def made(kind):
        folder = tmp_path_factory.mktemp("heads") / "head"
        if kind == "mtp" or kind in BLOCKS:
            write_new(kind, folder, family["small"])
        else:
            write(kind, folder)
        return folder, drafted(family["small"], folder)

    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_inflated_head_drafts_the_same_tokens(kind, shape, family, small_head, tmp_path):
    head, wanted = small_head(kind)
    assert drafted(family[shape], inflate_head(head, family[shape], tmp_path / "large")) == wanted


def test_a_head_takes_the_dtype_of_its_target(tmp_path):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "dtype": "bfloat16"}
    small = make_folder(tmp_path / "small", tie_word_embeddings=False, **sizes)
    large = inflate(small, tmp_path / "large", SHAPES["16 times as wide"])
    for kind in ("eagle1", "eagle3", "medusa"):
        write(kind, tmp_path / kind)
        tensors = load_file(inflate_head(tmp_path / kind, large, tmp_path / f"large-{kind}") / "model.safetensors")
        assert {weight.dtype for weight in tensors.values() if weight.is_floating_point()} == {torch.bfloat16}


def test_a_large_head_has_the_targets_widths_and_reads_the_same_layers(family, tmp_path):
    write_eagle3(tmp_path / "head", VOCAB, DRAFT_VOCAB)
    out = inflate_head(tmp_path / "head", family["four times as wide"], tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    large = SHAPES["four times as wide"]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "target_hidden_size")
    assert [config[name] for name in names] == [large.hidden, large.ffn, large.heads, large.kv_heads, large.hidden]
    real = json.loads((family["four times as wide"] / "config.json").read_text())["outrider_inflated"]["real_layers"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [real[1], real[2], real[3]]
    tensors = load_file(out / "model.safetensors")
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight", "lm_head.weight"):
        assert 0.01 < tensors[name][:, HIDDEN : 4 * HIDDEN].std() < 0.03, f"{name} is not dense"


def test_a_head_is_inflated_once_for_each_target(family, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    write_medusa(tmp_path / "head", VOCAB, 2)
    first = inflated_head(tmp_path / "head", family["four times as wide"])
    assert inflated_head(tmp_path / "head", family["four times as wide"]) == first
    assert inflated_head(tmp_path / "head", family["16 times as wide"]) != first
    write_medusa(tmp_path / "head", VOCAB, 2, seed=1)
    assert inflated_head(tmp_path / "head", family["four times as wide"]) != first


def test_unsupported_heads_give_a_one_line_error(family, tmp_path):
    write_medusa(tmp_path / "head", VOCAB, 2)
    with pytest.raises(OutriderError, match="not an inflated model"):
        inflate_head(tmp_path / "head", family["small"], tmp_path / "out")
    (tmp_path / "mtp").mkdir()
    save_file({"model.layers.4.eh_proj.weight": torch.zeros(2, 4)}, tmp_path / "mtp" / "model.safetensors")
    (tmp_path / "mtp" / "config.json").write_text("{}")
    with pytest.raises(OutriderError, match="only MTP heads in Qwen's layout"):
        inflate_head(tmp_path / "mtp", family["16 times as wide"], tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.part-*"))


def test_bench_inflates_the_heads_of_its_methods(family, tmp_path, monkeypatch, capsys):
    from outrider.cli import main

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider.bench.inflate.shape_for", lambda config, params: SHAPES["four times as wide"])
    write_medusa(tmp_path / "medusa", VOCAB, 2)
    write_eagle1(tmp_path / "eagle", VOCAB)
    methods = f"draft,medusa:draft={tmp_path / 'medusa'},eagle:draft={tmp_path / 'eagle'}:max_nodes=4"
    given = [
        "--target",
        family["small"],
        "--draft",
        family["small"],
        "--inflate",
        "1b",
        "--method",
        methods,
        "-k",
        "2",
    ]
    measured = ["--workloads", "code", "--num-prompts", "1", "--max-tokens", "4", "--repeat", "1", "--compile", "never"]
    monkeypatch.setattr(sys, "argv", ["outrider", "bench", *map(str, given), *measured])
    assert main() == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {cell["method"].split(":")[0] for cell in document["cells"]} >= {"draft", "medusa", "eagle"}
    built = {kind_of(folder) for folder in (tmp_path / "cache" / "inflated").iterdir()}
    assert built == {MODEL, MEDUSA, EAGLE}
