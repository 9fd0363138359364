"""Selection of a method's draft (its own, the general one, or the target's), and options of methods."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from heads.writers import HIDDEN, write_eagle1, write_eagle3, write_medusa
from huggingface_hub import constants
from tiny_folder import make_folder, make_tokenizer

from outrider import LLM, SamplingParams, family
from outrider.heads.checkpoint import EAGLE, MEDUSA, MODEL, kind_of
from outrider.method_text import combined, join_method, options_by_part, split_method, split_methods
from outrider.proposers.eagle import EagleConfig
from outrider.proposers.medusa import MedusaConfig
from outrider.proposers.method import Setting, chosen_draft
from outrider.registry import PROPOSERS
from outrider.runner import ModelRunner
from outrider.types import OutriderError

VOCAB, LAYERS = 320, 4
OPTIONS = {"compile": "never", "device": "cpu"}
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Create a target, and next to it a draft model and heads."""
    folder = tmp_path_factory.mktemp("family")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "max_position_embeddings": 2048}
    make_folder(folder / "target", **sizes)
    make_folder(folder / "draft", seed=1, max_position_embeddings=2048)
    write_medusa(folder / "medusa", VOCAB, 3)
    write_eagle1(folder / "eagle1", VOCAB)
    write_eagle3(folder / "eagle3", VOCAB, 100)
    return folder


@pytest.fixture
def embedded(home, monkeypatch):
    monkeypatch.setattr(family, "FOLDER", home)
    monkeypatch.setattr(family, "TARGET", home / "target")
    return home


def setting(**given):
    return Setting(None, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("eagle:hidden_states=2,4,6", {"hidden_states": (2, 4, 6)}),
        ("eagle:hidden_states=5", {"hidden_states": (5,)}),
        ("eagle:max_nodes=24:acceptance=0.5,0.25", {"max_nodes": 24, "acceptance": (0.5, 0.25)}),
        ("eagle:max_nodes=auto:hidden_states=none", {"max_nodes": None, "hidden_states": None}),
    ],
)
def test_options_are_converted_to_their_types(text, wanted):
    assert setting(options=split_method(text)[1]).config(EagleConfig) == EagleConfig(**wanted)


def test_rows_of_numbers_are_separated_by_slashes():
    options = split_method("medusa:accuracies=0.6,0.2/0.5,0.1")[1]
    assert setting(options=options).config(MedusaConfig).accuracies == ((0.6, 0.2), (0.5, 0.1))
    assert setting(options={"accuracies": [[0.5], [0.25]]}).config(MedusaConfig).accuracies == ((0.5,), (0.25,))


def test_measured_values_are_only_defaults():
    assert setting().config(EagleConfig, acceptance=(0.9, 0.1)).acceptance == (0.9, 0.1)
    assert setting(options={"acceptance": "0.5"}).config(EagleConfig, acceptance=(0.9, 0.1)).acceptance == (0.5,)
    assert setting(options={"top_k": "3"}).config(EagleConfig, acceptance=None) == EagleConfig(top_k=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "eagle:hidden_states=2,x",
            r"invalid hidden_states \[2, 'x'\]: expected a list of whole numbers from 0 on \(2,4,6\) or None",
        ),
        ("eagle:acceptance=nan", r"invalid acceptance \[nan\]: expected a list of numbers from 0 to 1"),
        ("eagle:bits=4", "invalid bits 4: expected 8 or 16 or None"),
        ("eagle:nodes=3", "the method has no option nodes"),
        ("eagle:max_nodes=0", "invalid max_nodes 0: expected a whole number, at least 1 or None"),
    ],
)
def test_an_unknown_or_invalid_option_is_rejected(text, message):
    with pytest.raises(OutriderError, match=message):
        setting(options=split_method(text)[1]).config(EagleConfig)


def test_a_list_of_methods_keeps_their_numbers():
    found = split_methods("draft,eagle:hidden_states=2,4,6:top_k=3, medusa:accuracies=0.5,.2/0.4,-1,suffix+draft")
    assert found == ["draft", "eagle:hidden_states=2,4,6:top_k=3", "medusa:accuracies=0.5,.2/0.4,-1", "suffix+draft"]
    assert join_method(*split_method(found[1])) == found[1]


@pytest.mark.parametrize("draft", ["a/b-GGUF:Q8_0", "a/b:c/d.gguf", "./a:b/c", "C:/model.gguf"])
def test_values_may_contain_colons(draft):
    options = {"draft": draft, "seed": "1"}
    assert split_method(join_method("draft", options)) == ("draft", options)
    assert split_method(f"draft:seed=1:draft={draft}") == ("draft", options)


@pytest.mark.parametrize("text", ["draft:", "draft:seed", "draft:seed:x=1", "draft:=1", "draft:seed=1:=1"])
def test_a_malformed_method_is_refused(text):
    with pytest.raises(OutriderError, match=f"invalid method '{text}': write options as draft:option=value"):
        split_method(text)


def test_a_repeated_option_is_refused():
    with pytest.raises(OutriderError, match="invalid method 'draft:seed=1:seed=2': repeated option"):
        split_method("draft:seed=1:seed=2")


def test_options_of_a_combination_are_split_by_method():
    parts = ["suffix:min_prob=0.2", "eagle:draft=./head.d:top_k=3"]
    assert combined(*parts) == "suffix+eagle:suffix.min_prob=0.2:eagle.draft=./head.d:eagle.top_k=3"
    joined = options_by_part(*split_method(combined(*parts) + ":min_first=6"))
    assert joined == {"": {"min_first": "6"}, "suffix": {"min_prob": "0.2"}, "eagle": {"draft": "./head.d", "top_k": "3"}}


def test_the_kind_of_a_folder_is_recognised(home):
    held = {path.name: kind_of(path) for path in home.iterdir()}
    assert {PROPOSERS.get(kind.name).drafts_with for kind in (MODEL, MEDUSA, EAGLE)} == {MODEL, MEDUSA, EAGLE}
    assert held == {"target": MODEL, "draft": MODEL, "medusa": MEDUSA, "eagle1": EAGLE, "eagle3": EAGLE}
    assert kind_of(home / "nowhere") is None


def test_the_methods_draft_precedes_the_general_one_and_the_targets_own(embedded):
    drafts = family.drafts()
    assert set(drafts) == {"draft", "medusa", "eagle1", "eagle3"}
    assert chosen_draft(PROPOSERS.get("eagle"), None, None, drafts) == embedded / "eagle3"
    assert chosen_draft(PROPOSERS.get("medusa"), None, None, drafts) == embedded / "medusa"
    assert chosen_draft(PROPOSERS.get("draft"), None, None, drafts) == embedded / "draft"
    assert chosen_draft(PROPOSERS.get("eagle"), "eagle1", str(embedded / "eagle3"), drafts) == embedded / "eagle1"
    assert chosen_draft(PROPOSERS.get("eagle"), None, str(embedded / "eagle1"), drafts) == str(embedded / "eagle1")


@pytest.mark.parametrize(
    ("method", "name", "said"),
    [
        ("eagle", "draft", "holds a draft model, and method 'eagle' needs an EAGLE head: use method 'draft' with it"),
        ("draft", "medusa", "holds Medusa heads, and method 'draft' needs a draft model: use method 'medusa' with it"),
        ("medusa", "eagle1", "holds an EAGLE head, and method 'medusa' needs Medusa heads: use method 'eagle' with it"),
        ("suffix+medusa", "draft", "use method 'draft' with it"),
    ],
)
def test_the_error_for_a_draft_of_another_kind_names_its_method(method, name, said, home):
    kind = PROPOSERS.get(method)
    with pytest.raises(OutriderError, match=said):
        kind.build(setting(draft=str(home / name)))
    with pytest.raises(OutriderError, match=said):
        kind.drafts_in({}, home / name, {})


def test_a_wrong_draft_in_the_download_cache_is_rejected_before_the_target_is_loaded(home, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--heads"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    shutil.copytree(home / "medusa", repository / "snapshots" / "c0ffee")
    said = "someone/heads holds Medusa heads, and method 'eagle' needs an EAGLE head: use method 'medusa' with it"
    with pytest.raises(OutriderError, match=said):
        PROPOSERS.get("eagle").drafts_in({}, "someone/heads", {})
    monkeypatch.setattr(ModelRunner, "load", lambda *_: pytest.fail("the target was loaded"))
    for options in ({"draft": "someone/heads"}, {"method_options": {"draft": "someone/heads"}}):
        with pytest.raises(OutriderError, match=said):
            LLM(home / "target", method="eagle", **options, **OPTIONS)


def test_a_target_without_heads_is_reported(home):
    with pytest.raises(OutriderError, match="'eagle3' is not among those that come with this target: give eagle:draft="):
        chosen_draft(PROPOSERS.get("eagle"), None, None, {"draft": home / "draft"})


@pytest.mark.parametrize(
    "method", ["draft", "medusa", "eagle", "eagle:draft=eagle1:top_k=2", "suffix+eagle:eagle.draft=eagle1"]
)
def test_each_method_finds_its_draft_of_the_embedded_target(method, embedded):
    llm = LLM(method=method, num_draft_tokens=3, **OPTIONS)
    plain = LLM(method="plain", **OPTIONS)
    assert (
        llm.generate([[5, 6, 7, 8]], SHORT)[0].outputs[0].token_ids
        == plain.generate([[5, 6, 7, 8]], SHORT)[0].outputs[0].token_ids
    )
    assert llm.stats.faults == 0
    if "eagle" in method and "suffix" not in method:
        assert llm.proposer.head.head.shape.generation == (1 if "eagle1" in method else 3)


def test_the_embedded_draft_model_is_the_default_of_the_embedded_target(embedded):
    assert LLM(**OPTIONS).proposer.name == "draft"


def test_options_reach_the_proposer(home):
    llm = LLM(home / "target", method=f"eagle:draft={home / 'eagle3'}:hidden_states=0,1,2:max_nodes=5", **OPTIONS)
    assert llm.proposer.needs_hidden == (0, 1, 2) and llm.proposer.num_nodes(8) == 5
    given = {"draft": home / "medusa", "max_nodes": 3}
    assert LLM(home / "target", method="medusa", method_options=given, **OPTIONS).proposer.num_nodes(3) == 3


def test_bench_compares_methods_with_a_draft_each(embedded, capsys, monkeypatch):
    from outrider.cli import main

    methods = "draft,medusa,eagle:draft=eagle1:top_k=2"
    small = ["--workloads", "code", "--num-prompts", "1", "--max-tokens", "4", "--repeat", "1", "--compile", "never"]
    monkeypatch.setattr(sys, "argv", ["outrider", "bench", "--method", methods, "-k", "2", *small])
    assert main() == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {"draft", "medusa", "eagle:draft=eagle1:top_k=2"} <= {cell["method"] for cell in document["cells"]}


def test_invalid_options_of_a_method_are_rejected_before_the_target_is_loaded(home, monkeypatch):
    monkeypatch.setattr(ModelRunner, "load", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(OutriderError, match=r"^early-exit:layers=two: invalid layers 'two': expected a whole number"):
        LLM(str(home / "target"), method="early-exit:layers=two")
    with pytest.raises(OutriderError, match=r"^ngram: the method has no option min_prob; it has"):
        LLM(str(home / "target"), method="ngram", method_options={"min_prob": 0.5})
    with pytest.raises(OutriderError, match=r"^suffix\+ngram:ngram\.foo=1: ngram: the method has no option foo"):
        LLM(str(home / "target"), method="suffix+ngram:ngram.foo=1")


def test_the_command_line_rejects_a_wrong_draft_before_loading(home, capsys, monkeypatch):
    from outrider.cli import main

    given = ["--target", str(home / "target"), "--draft", str(home / "draft"), "--method", "eagle", "hi"]
    monkeypatch.setattr(sys, "argv", ["outrider", "generate", *given])
    assert main() == 2
    assert "use method 'draft' with it" in " ".join(capsys.readouterr().err.split())


def test_a_base_model_drafts_for_a_chat_model_with_more_special_tokens(tmp_path, caplog):
    chat = make_tokenizer()
    chat.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    target, draft = make_folder(tmp_path / "chat", tokenizer=chat), make_folder(tmp_path / "base")
    caplog.set_level("INFO", "outrider")
    llm, plain = (LLM(target, draft=each, method=method, **OPTIONS) for each, method in ((draft, "auto"), (None, "plain")))
    assert llm.proposer.name == "draft" and "special tokens differ: 2 of them, the first '<user>'" in caplog.text
    done, expected = (each.generate("<user>def add(<assistant>", SHORT)[0].outputs[0] for each in (llm, plain))
    assert done.token_ids == expected.token_ids and done.stats.num_drafts > 0


def test_a_head_given_as_the_target_is_refused_with_what_it_is(home):
    for name, what in (("eagle1", "an EAGLE head"), ("medusa", "Medusa heads")):
        with pytest.raises(OutriderError, match=f"{name} holds {what}, not a model: give it as the draft"):
            LLM(home / name, **OPTIONS)
