"""A sample of ``make sweep``: every method gives the greedy output of transformers' generate for any architecture."""

from __future__ import annotations

import re

import pytest
import sweep
from architectures import page, tiny
from architectures.compare import METHODS, Result, compare

RUN = (
    "apertus",
    "bamba",
    "bitnet",
    "bloom",
    "cohere2_moe",
    "deepseek_v3 with yarn rope",
    "doge",
    "gemma3n_text",
    "gemma4",
    "gemma4_text with keys as values",
    "glm4_moe",
    "gpt2 with scores scaled by layer",
    "gpt_oss",
    "jamba",
    "jetmoe",
    "llama with tied weights",
    "llama4_text",
    "longcat_flash",
    "marian",
    "mimo_v2_flash",
    "moshi",
    "phi3 with longrope",
    "qwen2_5_vl",
    "whisper",
)
REFUSED = {
    "bigbird_pegasus": "bidirectional attention",
    "cpmant": "gives different logits with Outrider's cache than without a cache",
    "deepseek_v4": "their own cache (heavily_compressed_attention)",
    "deepseek_v32": "a separate index",
    "qwen4_exp_text": "a separate index",
    "inkling_text": "position_bias",
    "openai-gpt": "its own attention code",
    "rwkv": "a recurrent state",
    "unlimited_ocr": "their own cache (reference_sliding_attention)",
}


@pytest.mark.parametrize("name", RUN)
def test_sampled_architectures_match_generate(name, monkeypatch):
    monkeypatch.setattr("architectures.compare.NEW_TOKENS", 14)
    result = compare(name, ("plain", "draft"))
    assert (result.verdict, result.reason) == ("runs", "")
    accepted, drafted = map(int, re.findall(r"\d+", result.cells["draft"]))
    assert 0 < accepted < drafted  # accepted and rejected drafts are both covered


def test_early_exit_before_a_skipped_layer_is_refused():
    """Cross-attention layers of mllama run only with an image."""
    result = compare("mllama", ("early-exit",))
    assert result.cells["early-exit"].startswith("refused: ") and "skips these layers" in result.cells["early-exit"]


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_with_a_reason(name):
    result = compare(name)
    assert result.verdict == "refused"
    assert REFUSED[name] in result.reason
    assert "\n" not in result.reason


def _crash(name, answer):
    raise SystemExit(3)


def _hang(name, answer):
    sweep.time.sleep(60)


@pytest.mark.parametrize("work, said", [(_crash, "the process ended with code 3"), (_hang, "no result after 0 s")])
def test_a_crash_or_hang_affects_one_result_only(work, said, monkeypatch):
    monkeypatch.setattr(sweep, "_work", work)
    results = list(sweep.run(["llama", "gpt2"], jobs=2, timeout=60.0 if work is _crash else 0.2))
    assert sorted((each.name, each.verdict, each.reason) for each in results) == [
        ("gpt2", "fails", said),
        ("llama", "fails", said),
    ]


def test_a_run_resumes_and_writes_the_page(tmp_path, monkeypatch):
    asked = []

    def run(names, jobs, timeout):
        asked.append(list(names))
        yield from (Result(name, "runs", cells=dict.fromkeys(METHODS, "same")) for name in names)

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(tiny, "architectures", lambda: ["gpt2", "llama"])
    monkeypatch.setattr(tiny, "VARIANTS", {"llama, odd": ("llama", {})})
    results, document = tmp_path / "results.jsonl", tmp_path / "models.md"
    assert sweep.main(["llama", "--results", str(results), "--page", str(document)]) == 0
    assert not document.exists()
    assert sweep.main(["--results", str(results), "--page", str(document)]) == 0
    assert asked == [["llama"], ["gpt2", "llama, odd"]]
    assert "| llama | same | same | same | same | same |" in document.read_text()


def test_the_page_gives_the_reason_of_a_refusal():
    cells = dict.fromkeys(METHODS, "same") | {"early-exit": "refused: LlamaForCausalLM does not run its layers in parts"}
    results = [
        Result("llama", "runs", cells=cells),
        Result("bloom", "refused", "because | so"),
        Result("gpt2", "wrong", "plain"),
    ]
    text = page.page(results)
    assert "| llama | same | same | same | refused [1] | same |" in text
    assert "[1] it does not run its layers in parts" in text
    assert "| bloom | refused | because \\| so |" in text
    assert "| different output | 1 | 0 |" in text
