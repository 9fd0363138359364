"""The doctor reports whether a draft fits its target, and never passes a misfit."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from heads import block_checkpoints
from heads.mtp_checkpoints import rewrite, tiny_target, write_checkpoint
from heads.writers import write_eagle3
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder, make_tokenizer
from toy import outputs_of
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from outrider import LLM, doctor
from outrider.doctor import DoctorOptions, check_draft
from outrider.engine import finding
from outrider.proposers import early_exit
from outrider.proposers.base import Proposer, chain_proposal
from outrider.proposers.method import MethodSpec, Setting
from outrider.registry import PROPOSERS
from outrider.runner import ModelRunner, footprint
from outrider.runner.config import RunnerConfig
from outrider.runner.kv_cache import CacheShape, KVCache
from outrider.runner.state_cache import StateKey, StateShape, StateShapes, grouped
from outrider.types import Finding, SamplingParams
from outrider.weight_files import weight_bytes

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
OPTIONS = {"compile": "never", "device": "cpu"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("target"), num_hidden_layers=4, hidden_size=32, intermediate_size=64)


def examined(target, method="draft", draft=None, params=SHORT):
    options = OPTIONS | ({} if draft is None else {"draft": str(draft)})
    return check_draft(DoctorOptions(str(target), method, options, params))


def level_of(found, topic):
    return {finding.topic: finding.level for finding in found.findings}.get(topic)


def text_of(found, topic):
    return " ".join(finding.text for finding in found.findings if finding.topic == topic)


def test_the_target_as_its_own_draft_is_accepted_but_too_large(target):
    found = examined(target, draft=target)
    assert found.fits
    assert found.acceptance.by_position == [1.0] * doctor.K
    assert level_of(found, "vocabulary") == level_of(found, "text") == level_of(found, "context") == "ok"
    assert level_of(found, "size") == "suspicious"
    assert "fits, with doubts" in found.verdict


def test_the_head_in_a_checkpoint_is_examined(tmp_path):
    write_checkpoint("qwen2", tmp_path, tiny_target("qwen2", vocab_size=320))
    make_tokenizer().save_pretrained(tmp_path)
    found = examined(tmp_path, "mtp")
    assert level_of(found, "loading") == "ok" and "one tree level reads" in text_of(found, "size")
    rewrite(tmp_path, lambda tensors: tensors.pop("model.mtp_layers.0.input_proj.weight"))
    assert "model.mtp_layers.0.input_proj.weight" in " ".join(each.text for each in examined(tmp_path, "mtp").findings)


def test_a_block_drafter_is_examined(tmp_path):
    block_checkpoints.block_target(vocab_size=320).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    config = block_checkpoints.native_config(vocab_size=320, outrider={"acceptance_by_position": [0.71, 0.5]})
    head = block_checkpoints.write(tmp_path / "head", config, block_checkpoints.head_tensors())
    found = examined(tmp_path / "target", "dflash", head)
    assert level_of(found, "vocabulary") == level_of(found, "layers") == "ok"
    assert "at most 7 drafts in one pass" in text_of(found, "block") and "71%, 50%" in text_of(found, "acceptance")
    block_checkpoints.write(head, config | {"num_target_layers": 36}, block_checkpoints.head_tensors())
    assert level_of(examined(tmp_path / "target", "dflash", head), "layers") == "suspicious"
    block_checkpoints.write(head, config | {"outrider": {"acceptance_by_position": "high"}}, block_checkpoints.head_tensors())
    assert "expected a list of numbers" in examined(tmp_path / "target", "dflash", head).findings[-1].text
    name = "layers.1.self_attn.v_proj.weight"
    rewrite(head, lambda tensors: tensors.pop(name))
    assert name in " ".join(each.text for each in examined(tmp_path / "target", "dflash", head).findings)


def test_passes_over_experts_are_timed_with_tokens_that_use_different_ones(tmp_path, monkeypatch):
    make_folder(tmp_path)
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 16}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2)).save_pretrained(tmp_path)
    runner = ModelRunner.load(tmp_path, RunnerConfig(compile="never", device="cpu"))
    used: list[int] = []
    gate = next(module for name, module in runner.model.named_modules() if name.endswith("mlp.gate"))
    gate.register_forward_hook(lambda module, args, out: used.append(len(set(out[-1].flatten().tolist()))))
    runner.measure_pass(6, 1, 16)
    assert max(used) > 4  # equal tokens are routed to two of the eight experts
    monkeypatch.setattr(ModelRunner, "measure_pass", lambda self, width, *_: float(width))
    found = examined(tmp_path, "ngram")
    assert level_of(found, "passes") == "suspicious"
    # the root and five drafts read 8 * (1 - 0.75^6) = 6.6 of the eight experts
    assert "reads 2 of 8 experts in a layer, 6 tokens about 7 of them" in text_of(found, "passes")


def test_a_draft_of_another_target_does_not_fit(target, tmp_path):
    found = examined(target, draft=make_folder(tmp_path, seed=9))
    assert not found.fits
    assert level_of(found, "acceptance") == "wrong"
    assert found.acceptance.by_position[0] < doctor.HOPELESS
    assert "does not fit" in found.verdict


def test_another_vocabulary_is_found_before_the_draft_is_loaded(target, tmp_path):
    draft = make_folder(tmp_path, tokenizer=make_tokenizer(300))
    (draft / "model.safetensors").write_bytes(b"never read")
    found = examined(target, draft=draft)
    assert not found.fits and found.acceptance is None
    assert found.findings[-1].topic == "vocabulary" and "different vocabularies" in found.findings[-1].text


def test_a_shorter_window_is_noted(target, tmp_path):
    found = examined(target, draft=make_folder(tmp_path, max_position_embeddings=128))
    assert level_of(found, "context") == "note"


@pytest.mark.parametrize("harm", ["truncated", "nan", "missing"])
def test_a_broken_file_is_a_finding_not_an_exception(target, tmp_path, harm):
    draft = tmp_path / "draft"
    shutil.copytree(target, draft)
    file = draft / "model.safetensors"
    if harm == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif harm == "missing":
        file.unlink()
    else:
        tensors = load_file(file)
        tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
        save_file(tensors, file, metadata={"format": "pt"})
    found = examined(target, draft=draft)
    assert not found.fits
    assert found.findings[-1].level == "wrong" and found.findings[-1].topic == "loading"
    assert "\n" not in found.findings[-1].text
    if harm == "nan":
        assert "model.norm.weight contain NaN" in found.findings[-1].text


def test_weights_larger_than_memory_are_reported_before_loading(target, monkeypatch):
    monkeypatch.setattr(doctor, "free_memory", lambda: 1000)
    found = examined(target, draft=target)
    assert [finding.level for finding in found.findings] == ["wrong"] and found.findings[0].topic == "memory"


def test_on_a_gpu_its_own_memory_is_compared(target, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1 << 40))
    monkeypatch.setattr(doctor, "choose_reader", lambda *_: None)
    found = check_draft(DoctorOptions(str(target), "ngram", OPTIONS | {"device": "cuda"}, SHORT))
    assert [finding.topic for finding in found.findings] == ["memory"] and "0 MB of memory are free" in found.findings[0].text
    cache = SimpleNamespace(row_bytes=lambda slots: 2000)
    runner = SimpleNamespace(cache=cache, max_len=512, device=torch.device("cuda"))
    assert doctor._cache_memory(runner).level == "suspicious"


def test_quantised_weights_are_counted_as_they_are_in_memory(target, monkeypatch):
    free = 4 * weight_bytes(target)
    monkeypatch.setattr(doctor, "free_memory", lambda: free)
    assert level_of(examined(target, "ngram"), "memory") == "ok"
    monkeypatch.setattr(footprint, "growth_of", lambda *_: 4)  # as of FP8 without kernels
    assert level_of(examined(target, "ngram"), "memory") == "wrong"
    monkeypatch.setattr(doctor, "free_memory", lambda: 1000)
    packed = check_draft(DoctorOptions(str(target), "ngram", {**OPTIONS, "weights": "int4"}, SHORT))
    assert level_of(packed, "memory") is None and packed.acceptance is not None
    options = {**OPTIONS, "weights": "int4", "draft": str(target)}
    drafts = check_draft(DoctorOptions(str(target), "draft", options, SHORT))
    assert text_of(drafts, "memory").startswith("the draft's weights take ")


def test_the_targets_own_methods_are_examined_by_their_own_checks(target):
    found = examined(target, method="early-exit:layers=2")
    assert level_of(found, "exits") in ("ok", "suspicious")
    assert found.acceptance is not None


def test_an_exit_outside_the_target_is_found_before_exits_are_measured(target, monkeypatch):
    monkeypatch.setattr(early_exit, "measure_exits", lambda *args: pytest.fail("it was measured"))
    found = examined(target, method="early-exit:layers=99")
    assert found.findings[-1].text == "invalid number of layers 99 for early exit: expected 1 to 3"


def test_a_draft_with_another_tokenizer_is_measured_by_the_method_that_takes_one(target, tmp_path):
    found = examined(target, method="cross-tokenizer", draft=make_folder(tmp_path, tokenizer=make_tokenizer(300)))
    assert level_of(found, "vocabulary") == "ok"
    assert "of the target's 320 tokens" in text_of(found, "vocabulary")
    assert level_of(found, "context") == "ok" and found.acceptance is not None


def test_a_combined_method_is_examined_as_both_of_its_methods(target, tmp_path):
    found = examined(target, method="suffix+draft:draft.draft=" + str(target))
    assert level_of(found, "vocabulary") == "ok" and found.acceptance.by_position[0] > 0.9
    head = write_eagle3(tmp_path / "head", 320, 320) and tmp_path / "head"
    setting = Setting(LLM(str(target), method="plain", **OPTIONS).runner, options={"eagle.draft": str(head)})
    joint = PROPOSERS.get("suffix+eagle")
    assert joint.alternatives(setting) == ["eagle.hidden_states=0,1,2", "eagle.hidden_states=2,3,4"]
    assert [finding.topic for finding in joint.examine(setting)][:2] == ["vocabulary", "draft vocabulary"]


def test_text_without_repetition_is_not_a_misfit(target):
    found = examined(target, method="suffix")
    assert found.fits and level_of(found, "acceptance") == "note"
    assert "little repetition" in text_of(found, "acceptance")


def test_without_drafts_no_acceptance_is_reported(target):
    found = examined(target, method="plain")
    assert found.acceptance.by_position == [] and "nothing was drafted" in text_of(found, "acceptance")


@pytest.mark.parametrize(
    ("tok_s", "verdict"), [(150.0, "fits: 1.50 times"), (82.0, "fits, but is slower on this machine: 0.82 times")]
)
def test_the_verdict_agrees_with_the_speed(tok_s, verdict):
    found = doctor.Report(acceptance=doctor.Acceptance([0.5], 2.0, 100.0, tok_s, num_prompts=4, k=5))
    assert found.verdict.startswith(verdict)


class Guessing(Proposer):
    """With the right option, drafts the target's output; otherwise only at a given share of positions, and zeros elsewhere."""

    name = "guessing"
    answers: ClassVar[list[list[int]]] = []

    def __init__(self, tenths):
        self.tenths = tenths

    def propose(self, context, k):
        chains = []
        for request, limit in zip(context.requests, context.limits, strict=True):
            text = next((a for a in self.answers if a[: len(request.token_ids)] == request.token_ids), [])
            right = text[len(request.token_ids) :][: min(k, limit)]
            chains.append(right if len(request.token_ids) * 7 % 10 < self.tenths else [299] * min(k, limit))
        return chain_proposal(chains)


class GuessingMethod(MethodSpec):
    proposer = Guessing

    def build(self, setting: Setting):
        return Guessing(10 if setting.options.get("layer") == "3" else int(setting.options.get("tenths", 0)))

    def examine(self, setting: Setting):
        yield Finding("note", "head", "looked at")

    def alternatives(self, setting: Setting):
        return ["layer=1", "layer=3"]


@pytest.fixture
def guessing(target, monkeypatch):
    """Register the method with the target's output for the doctor's prompts."""
    from outrider.bench.workloads import builtin, encode

    monkeypatch.setitem(PROPOSERS._entries, "guessing", GuessingMethod())
    llm = LLM(str(target), method="plain", **OPTIONS)
    prompts = [encode(llm.tokenizer, prompt)[-128:] for kind in doctor.WORKLOADS for prompt in builtin(kind, 1)]
    texts = outputs_of(llm.generate(prompts, LONG))
    Guessing.answers = [prompt + text.token_ids for prompt, text in zip(prompts, texts, strict=True)]


@pytest.mark.usefixtures("guessing")
def test_the_fitting_alternative_is_named_at_low_acceptance(target):
    found = examined(target, method="guessing:layer=2")
    assert not found.fits and level_of(found, "head") == "note"
    assert level_of(found, "options") == "suspicious"
    assert "guessing:layer=3 fits better" in found.findings[-1].text


@pytest.mark.usefixtures("guessing")
def test_a_method_that_makes_fewer_drafts_is_judged_by_these(target, monkeypatch):
    monkeypatch.setattr(Guessing, "max_drafts", 2)
    found = examined(target, method="guessing:layer=3")
    assert found.acceptance.k == 2 and "with 2 drafts per round" in found.verdict


@pytest.mark.usefixtures("guessing")
def test_a_better_alternative_is_named_at_high_acceptance_too(target, monkeypatch):
    """A hidden state that is off by one layer costs a head some acceptance, but rarely all."""
    found = examined(target, method="guessing:layer=2:tenths=6", params=LONG)
    assert found.acceptance.by_position[0] > doctor.DOUBTFUL
    assert found.fits and level_of(found, "options") == "suspicious"
    assert "guessing:layer=3:tenths=6 fits better" in text_of(found, "options")
    monkeypatch.setattr(doctor, "FALSE_ALARMS", 1e-15)
    found = examined(target, method="guessing:layer=2:tenths=6", params=LONG)
    assert level_of(found, "options") == "note" and "not significant" in text_of(found, "options")
    found = examined(target, method="guessing:layer=3", params=LONG)
    assert level_of(found, "options") == "ok" and "no better" in text_of(found, "options")


def test_the_best_of_many_alternatives_must_be_better_than_by_chance():
    def run(*accepted):
        return SimpleNamespace(rounds=[SimpleNamespace(num_accepted=list(accepted))])

    few, more = run(*[0, 1] * 50), run(*[0, 1, 1] * 33)  # 2.4 standard errors apart
    assert doctor._is_significant(more, few, num_tried=1)
    assert not doctor._is_significant(more, few, num_tried=4)
    assert not doctor._is_significant(run(2, 0, 1), run(0, 1, 1), num_tried=1)  # half as many again, of three rounds
    assert not doctor._is_significant(run(), few, num_tried=1)


def test_the_command_prints_the_verdict_and_sets_the_exit_code(target, tmp_path, capsys):
    from outrider.cli import main

    given = ["doctor", "--target", str(target), "--compile", "never", "--max-tokens", "12", "--ignore-eos"]
    assert main([*given, "--draft", str(target)]) == 0
    out = capsys.readouterr().out
    assert "vocabulary" in out and "acceptance   of draft 1, 2, ..." in out and "verdict      fits" in out
    assert main([*given, "--draft", str(make_folder(tmp_path, seed=9)), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False and any(finding["level"] == "wrong" for finding in document["findings"])


def test_the_command_lists_every_candidate_with_size_and_reason(tmp_path, capsys):
    from outrider.cli import main

    make_folder(tmp_path / "target", hidden_size=32, intermediate_size=48, num_hidden_layers=12)
    make_folder(tmp_path / "draft", seed=1, num_hidden_layers=16, hidden_size=128, intermediate_size=128)
    write_eagle3(tmp_path / "eagle3", 320, 320)
    write_eagle3(tmp_path / "eagle-later", 320, 320)
    make_folder(tmp_path / "target-small", tokenizer=make_tokenizer(300))
    given = ["doctor", "--target", str(tmp_path / "target"), "--compile", "never", "--max-tokens", "8", "--json"]
    main(given)
    found = [
        (each["level"], each["text"]) for each in json.loads(capsys.readouterr().out)["findings"] if each["topic"] == "drafter"
    ]
    assert [level for level, _ in found] == ["note", "note", "ok", "note"]
    texts = [text.replace(str(tmp_path), "") for _, text in found]
    assert re.fullmatch(r"draft model /draft, \d+ MB, found next to the target: not used: it has \d+.\d% of the.*", texts[0])
    assert re.fullmatch(r"/target-small, \d+ MB, found next to the target: not used: .* different vocabularies .*", texts[1])
    assert re.fullmatch(r"EAGLE-3 head /eagle3, \d+ MB, found next to the target: used", texts[2])
    assert re.fullmatch(r"EAGLE-3 head /eagle-later, .*: not used: another one is preferred", texts[3])
    main([*given, "--method", "suffix"])
    assert not [each for each in json.loads(capsys.readouterr().out)["findings"] if each["topic"] == "drafter"]


def test_the_command_downloads_no_drafter_that_is_not_used(tmp_path, monkeypatch, capsys):
    from outrider.cli import main

    fetched = []
    monkeypatch.setattr(finding, "find_folder", fetched.append)
    monkeypatch.setattr(finding, "PAIRS", tmp_path / "pairs.toml")
    (tmp_path / "pairs.toml").write_text('["Org/model"]\ndraft = ["Org/small"]\n')
    model = make_folder(tmp_path / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=12)
    assert [each.text for each in doctor.all_candidates(str(model)) if "Org/" in each.text] == [
        "Org/small, known for the target: not used: it is not on this machine; --download-draft fetches it"
    ]
    write_eagle3(tmp_path / "eagle3", 320, 320)
    monkeypatch.setattr(doctor, "check_draft", lambda *_: doctor.Report())
    main(["doctor", "--target", str(model), "--json", "--download-draft"])
    texts = [each["text"] for each in json.loads(capsys.readouterr().out)["findings"]]
    assert "Org/small, known for the target: not used: another one is preferred" in texts and not fetched


def test_the_command_examines_foreign_drafts_by_their_default_method(target, tmp_path, capsys):
    from outrider.cli import main

    foreign = make_folder(tmp_path, tokenizer=make_tokenizer(300))
    given = [
        "doctor",
        "--target",
        str(target),
        "--draft",
        str(foreign),
        "--compile",
        "never",
        "--max-tokens",
        "12",
        "--ignore-eos",
    ]
    main(given)
    assert "of the target's 320 tokens" in " ".join(capsys.readouterr().out.split())
    assert main([*given, "--method", "draft"]) == 3
    assert "different vocabularies" in " ".join(capsys.readouterr().out.split())


def test_the_cache_of_a_request_includes_recurrent_states():
    states = StateShapes(*grouped({StateKey(0, 0, False): StateShape((1000, 1000))}))
    cpu = torch.device("cpu")
    cache = KVCache(CacheShape.of({}, states=states), 1, 512, torch.float32, cpu, max_drafts=8)  # 10 states
    found = doctor._cache_memory(SimpleNamespace(cache=cache, max_len=512, device=cpu))
    assert found.text.startswith("a request that fills the context of 512 tokens takes 40 MB of cache")


def test_a_head_of_another_vocabulary_is_no_foreign_draft(target, tmp_path, capsys):
    from outrider.cli import main

    write_eagle3(tmp_path, 300, 300)
    assert main(["doctor", "--target", str(target), "--draft", str(tmp_path), "--compile", "never", "--max-tokens", "12"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "WRONG vocabulary made for a vocabulary of 300 tokens, but the target has 320" in out
    assert "cross-tokenizer" not in out
