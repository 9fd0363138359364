"""Method auto: drafters found in the checkpoint, next to it or in the download cache are checked and used."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
from pathlib import Path

import gguf
import gguf_files
import pytest
import torch
from heads import block_checkpoints
from heads.mtp_checkpoints import rewrite, tiny_target, write_checkpoint
from heads.writers import HIDDEN, write_eagle1, write_eagle3, write_medusa
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder, make_tokenizer
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams, hub
from outrider.engine import finding
from outrider.engine.finding import target_files
from outrider.engine.methods import auto_choice
from outrider.heads.checkpoint import MODEL, kind_of
from outrider.method_text import split_method
from outrider.proposers.draft_model import DraftModelMethod, DraftModelProposer
from outrider.proposers.method import Recognised
from outrider.registry import DEFAULT_METHOD, PROPOSERS, VERIFIERS
from outrider.runner.parallel_draft import ParallelDraft
from outrider.types import OutriderError

VOCAB, LAYERS = 320, 12
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
QUIET = {"compile": "never", "device": "cpu", "self_check": False}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Provide an empty download cache and fail the test at any connection, even if the package catches the error."""
    tried = []

    def refuse(*args, **_):
        tried.append(args)
        raise OSError("no network in tests")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not tried


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Create a target and drafters for it, each in its own folder; tests copy them to the places that are searched."""
    folder = tmp_path_factory.mktemp("made")
    make_folder(folder / "target", **SIZES)
    make_folder(folder / "draft", seed=1)
    write_eagle3(folder / "eagle3", VOCAB, 100)
    write_eagle1(folder / "eagle1", VOCAB)
    write_medusa(folder / "medusa", VOCAB, 3)
    write_checkpoint("qwen2", folder / "own", tiny_target("qwen2", vocab_size=VOCAB))
    make_tokenizer().save_pretrained(folder / "own")
    return folder


@pytest.fixture
def target(made, tmp_path):
    return copied(made / "target", tmp_path / "models" / "model")


@pytest.fixture
def said(caplog):
    """Return the package's log messages."""
    caplog.set_level(logging.INFO, "outrider")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("outrider.engine")]


def copied(source, to):
    shutil.copytree(source, to)
    return to


def cached(source, hub_id):
    """Put a folder into the download cache as ``huggingface_hub`` would."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    return copied(source, repository / "snapshots" / "c0ffee")


def chosen(target, **more):
    return auto_choice(str(target), None, {}, **more)


def loaded(target, **options):
    return LLM(target, **QUIET, **options)


def greedy(llm):
    return llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids


# --- places -----------------------------------------------------------------------------------------------------------------


def test_a_head_in_the_targets_checkpoint_is_used(made, tmp_path, said):
    own = copied(made / "own", tmp_path / "own")
    copied(made / "draft", tmp_path / "draft")  # next to the target, but not used
    llm = loaded(own)
    assert llm.proposer.name == "mtp" and llm.drafter == "drafts with MTP head (in the target's checkpoint)"
    assert llm.drafter in said() and len(said()) == 1
    assert greedy(llm) == greedy(loaded(own, method="plain")) and llm.stats.faults == 0
    own_bytes = sum(tensor.nbytes for name, tensor in load_file(own / "model.safetensors").items() if "mtp_layers" in name)
    listed = next(iter(finding.candidates(target_files(own))))
    assert (listed.where, listed.num_bytes) == (finding.OWN, own_bytes)  # not those of the target


def test_a_block_drafter_in_the_targets_folder_is_used(tmp_path, said):
    target = block_checkpoints.block_target(vocab_size=VOCAB)
    target.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    config = block_checkpoints.native_config(vocab_size=VOCAB)
    block_checkpoints.write(tmp_path / "model" / "dflash", config, block_checkpoints.head_tensors())
    llm = loaded(tmp_path / "model")
    assert llm.proposer.name == "dflash" and "block drafter" in llm.drafter
    assert greedy(llm) == greedy(loaded(tmp_path / "model", method="plain")) and llm.stats.faults == 0
    rewrite(tmp_path / "model" / "dflash", lambda tensors: tensors.update({"candidate_selector.x": torch.zeros(2)}))
    llm = loaded(tmp_path / "model")
    assert llm.proposer.name == DEFAULT_METHOD and "DFlash 2's path selector" in " ".join(said())


@pytest.mark.parametrize("harm", ["dropped", "named in the config alone", "quantised", "cut"])
def test_a_missing_or_incomplete_head_is_skipped(made, tmp_path, said, harm):
    own = copied(made / "own", tmp_path / "own")

    def change(tensors):
        for name in [name for name in tensors if "mtp_layers" in name]:
            if harm in ("dropped", "named in the config alone"):
                del tensors[name]
            elif harm == "quantised" and "mlp" in name:
                tensors[name] = tensors[name].to(torch.int8)
            elif harm == "cut" and "input_proj" in name:
                tensors[name] = tensors[name][:, :-1].contiguous()

    rewrite(own, change)
    if harm == "named in the config alone":
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert chosen(own).method == DEFAULT_METHOD
    lines = [line for line in said() if "not used" in line]
    expected = {"quantised": "the head is quantised: .* is int8", "cut": r"has shape \[32, 63\], expected \[32, 64\]"}
    assert len(lines) == (harm in expected) and all(re.search(expected[harm], line) for line in lines)


@pytest.mark.parametrize("place", ["model/{}", "{}", "model-{}"])
@pytest.mark.parametrize(
    ("name", "method"), [("draft", "draft"), ("eagle3", "eagle"), ("eagle1", "eagle"), ("medusa", "medusa")]
)
def test_drafters_in_or_next_to_the_targets_folder_are_used(made, target, place, name, method):
    source = copied(made / name, target.parent / place.format(name))
    found = chosen(target)
    assert (found.method, found.draft) == (method, str(source))
    assert f"{source} (found {'in' if place[:6] == 'model/' else 'next to'} the target" in found.why
    if place == "{}":
        llm = loaded(target)
        assert llm.proposer.name == method and llm.drafter == found.why
        assert greedy(llm) == greedy(loaded(target, method="plain")) and llm.stats.faults == 0


def test_a_head_file_in_the_targets_folder_is_used(made, tmp_path):
    own = copied(made / "own", tmp_path / "own")
    tensors = load_file(own / "model.safetensors")
    head = {name: tensors.pop(name) for name in list(tensors) if "mtp_layers" in name}
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    save_file(head, own / "head.safetensors")
    llm = loaded(own)
    assert llm.proposer.name == "mtp" and f"{own / 'head.safetensors'} (found in the target's folder)" in llm.drafter
    assert greedy(llm) == greedy(loaded(own, method="plain")) and llm.stats.faults == 0


def test_draft_models_precede_heads_and_heads_with_default_names_precede_others(made, target):
    for name in ("medusa", "eagle1", "eagle3", "draft"):
        copied(made / name, target.parent / name)
    order = []
    while (found := chosen(target)).method != DEFAULT_METHOD:
        order.append(Path(found.draft).name)
        shutil.rmtree(found.draft)
    assert order == ["draft", "eagle3", "eagle1", "medusa"]


def test_a_neighbouring_folder_with_an_unrelated_name_is_ignored(made, target):
    copied(made / "draft", target.parent / "small")
    assert chosen(target).method == DEFAULT_METHOD


def test_a_draft_that_reads_mask_tokens_is_found_and_drafts_in_one_pass(made, target, said):
    draft = copied(made / "draft", target.parent / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": 7}))
    llm = loaded(target)
    assert llm.drafter == f"drafts with parallel draft model {draft} (found next to the target)"
    assert isinstance(llm.proposer.draft, ParallelDraft) and greedy(llm) == greedy(loaded(target, method="plain"))
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": -1}))
    assert chosen(target).method == "suffix"
    assert any("invalid pard_token -1" in line and str(draft) in line for line in said())


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_the_code_of_a_found_draft_is_never_trusted(made, target, said, name):
    draft = copied(made / "draft", target.parent / "draft")
    settings = json.loads((draft / name).read_text()) | {
        "auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    }
    (draft / name).write_text(json.dumps(settings))
    (draft / "own.py").write_text("raise SystemExit('code of a stranger')")
    assert chosen(target).method == "draft"  # transformers' own classes
    assert chosen(target, trusts_code=True).method == DEFAULT_METHOD
    assert f"{draft}, " in said()[-2] and "runs only for a draft that you name" in said()[-2]
    assert loaded(target, trust_remote_code=True).proposer.name == DEFAULT_METHOD


def test_a_known_drafter_in_the_download_cache_is_used(made, target, monkeypatch, tmp_path):
    pairs = tmp_path / "pairs.toml"
    pairs.write_text('["Org/Model"]\neagle = ["Other/absent", "Other/head"]\ndraft = ["Org/small"]\n')
    monkeypatch.setattr(finding, "PAIRS", pairs)
    assert chosen(target).why.endswith("no drafter was found for the target; --download-draft fetches Other/absent")
    source = cached(made / "eagle3", "Other/head")
    found = chosen(target)
    assert (found.method, found.draft) == ("eagle", str(source))
    assert found.why == "drafts with EAGLE-3 head Other/head (known for the target, in the download cache)"
    assert loaded(target).drafter == found.why
    hub = cached(made / "target", "Org/Model")  # by its id, and by the folder of its download
    assert chosen("Org/Model").draft == chosen(hub).draft == str(source)
    shutil.rmtree(source)
    cached(made / "draft", "Org/small")
    assert chosen(target).why == "drafts with draft model Org/small (known for the target, in the download cache)"


def test_a_listed_block_drafter_in_the_download_cache_is_used(tmp_path):
    target = tmp_path / "Qwen3-8B"
    block_checkpoints.block_target(vocab_size=VOCAB).save_pretrained(target)
    make_tokenizer().save_pretrained(target)
    block_checkpoints.write(
        tmp_path / "head", block_checkpoints.native_config(vocab_size=VOCAB), block_checkpoints.head_tensors()
    )
    source = cached(tmp_path / "head", "z-lab/Qwen3-8B-DFlash-b16")
    found = chosen(target)
    assert (found.method, found.draft) == ("dflash", str(source)) and "known for the target" in found.why


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B-GPTQ-Int8", "unsloth/Qwen3-8B-bnb-4bit"),
        *("RedHatAI/Qwen3-8B-FP8-dynamic", "RedHatAI/Qwen3-8B-quantized.w4a16", "qwen3-8b"),
        *("Qwen3-8B-Q4_K_M.gguf", "Qwen_Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B.i1-Q4_K_M.gguf"),
    ],
)
def test_known_drafters_are_found_for_the_names_of_quantised_files(name, tmp_path):
    assert finding.known_drafters(named(name, tmp_path))[:1] == ["Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-Base", "other/My-Qwen3-8B", "Qwen3-8B-AWQ-2"])
def test_other_models_with_such_names_have_no_known_drafters(name, tmp_path):
    assert finding.known_drafters(named(name, tmp_path)) == []


def named(name, tmp_path):
    """Return a target without content in the download cache, in a folder or in a GGUF file."""
    path = tmp_path / name
    if "/" in name:
        path = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "c0ffee"
    (path.parent if path.suffix == ".gguf" else path).mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gguf":
        path.touch()
    return finding.TargetFiles(name, path, None)


def test_the_smallest_sufficient_model_of_the_family_is_used(made, target, tmp_path, said):
    small = cached(made / "draft", "Org/model-small")
    cached(make_folder(tmp_path / "medium", num_hidden_layers=4), "Org/model-medium")
    one = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"), 1
    )
    cached(make_folder(tmp_path / "tiny", **one), "Org/model-tiny")
    cached(make_folder(tmp_path / "foreign", tokenizer=make_tokenizer(300)), "Org/foreign")
    (cached(made / "draft", "Org/unknown") / "tokenizer.json").unlink()
    cached(made / "eagle3", "Org/head")  # not known for any target
    cached(made / "target", "Org/same")
    found = chosen(target)
    assert (found.method, found.draft) == ("draft", str(small))
    assert found.why == f"drafts with draft model Org/model-small ({finding.FAMILY})"
    assert [line for line in said() if "not used" in line] == []
    llm = loaded(target)
    assert llm.drafter == found.why and greedy(llm) == greedy(loaded(target, method="plain"))
    misfits = {each.name: each.misfit for each in finding.candidates(finding.target_files(target))}
    assert set(misfits) == {"Org/model-small", "Org/model-medium", "Org/model-tiny", "Org/same"}
    assert "100.0% of the target's weights" in misfits["Org/same"] and "expected at least 0.5%" in misfits["Org/model-tiny"]


@pytest.mark.parametrize("kind", ["classifier", "embedding", "experts"])
def test_a_model_without_next_tokens_or_with_many_experts_is_not_used(made, target, kind):
    found = cached(made / "draft", "Org/model-small")
    config = json.loads((found / "config.json").read_text())
    if kind == "embedding":
        (found / "modules.json").write_text("[]")
    else:
        changes = {"architectures": ["LlamaForSequenceClassification"]} if kind == "classifier" else {"num_experts": 64}
        (found / "config.json").write_text(json.dumps(config | changes))
    assert chosen(target).method == DEFAULT_METHOD
    misfits = [each.misfit for each in finding.candidates(finding.target_files(target))]
    assert len(misfits) == (kind == "experts") and all(["of the target's weights" in each for each in misfits])


def test_of_equal_sizes_the_most_similar_name_is_used(made):
    cached(made / "target", "Org/Model-1.1-Instruct")
    for name in ("Model-1.2-base", "Model-1.2-Instruct", "Zebra"):
        cached(made / "draft", f"Org/{name}")
    assert "Org/Model-1.2-Instruct" in chosen("Org/Model-1.1-Instruct").why


def as_gguf(folder, path, **options):
    """Write a folder's model as a GGUF file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    gguf_files.write(path, AutoModelForCausalLM.from_pretrained(folder), lambda _: gguf.GGMLQuantizationType.F32, **options)
    return path


def test_a_gguf_file_named_as_a_draft_drafts_for_one_beside_it(made, tmp_path):
    target = as_gguf(made / "target", tmp_path / "models" / "model-Q8_0.gguf")
    draft = as_gguf(made / "draft", target.parent / "draft-small.gguf")
    llm = loaded(target)
    assert llm.drafter == f"drafts with draft model {draft} (found next to the target)"
    assert greedy(llm) == greedy(loaded(target, method="plain")) and llm.stats.num_drafts > 0


def test_a_smaller_gguf_file_of_the_family_in_the_targets_folder_drafts(made, tmp_path, said):
    target = as_gguf(made / "target", tmp_path / "models" / "model-Q8_0.gguf")
    (target.parent / "broken.gguf").write_bytes(b"GGUF")
    (target.parent / "gone.gguf").symlink_to(target.parent / "nowhere")
    as_gguf(make_folder(tmp_path / "medium", **(SIZES | {"num_hidden_layers": 8})), target.parent / "medium.gguf")
    assert chosen(target).method == DEFAULT_METHOD
    small = as_gguf(made / "draft", target.parent / "small.gguf")
    llm = loaded(target)
    assert llm.drafter == f"drafts with draft model {small} ({finding.SIBLING})"
    assert greedy(llm) == greedy(loaded(target, method="plain")) and llm.stats.num_drafts > 0
    assert all("broken.gguf" in line for line in said() if "not used" in line)


def test_a_gguf_file_in_parts_is_one_model(made, tmp_path, said):
    folder = tmp_path / "models"
    as_gguf(made / "target", folder / "model.gguf", tensors_a_part=60)
    as_gguf(made / "draft", folder / "small.gguf", tensors_a_part=12)
    names = sorted(each.name for each in folder.iterdir())
    assert len(names) > 3 and all("-of-" in name for name in names)
    found = list(finding.candidates(finding.target_files(folder / names[0])))
    assert [Path(each.name).name for each in found] == [next(name for name in names if name.startswith("small"))]
    assert not found[0].misfit and not said()


def test_a_model_of_the_family_and_a_known_drafter_are_found_for_a_gguf_file(made, monkeypatch, tmp_path, said):
    target = as_gguf(made / "target", tmp_path / "models" / "Model-UD-Q4_K_XL.gguf")
    cached(make_folder(tmp_path / "foreign", tokenizer=make_tokenizer(300)), "Org/foreign")
    assert chosen(target).method == DEFAULT_METHOD
    cached(made / "draft", "Org/model-small")
    assert chosen(target).why == f"drafts with draft model Org/model-small ({finding.FAMILY})"
    pairs = tmp_path / "pairs.toml"
    pairs.write_text('["Org/Model"]\neagle = ["Other/head"]\n')
    monkeypatch.setattr(finding, "PAIRS", pairs)
    source = cached(made / "eagle3", "Other/head")
    llm = loaded(target)
    assert llm.drafter == "drafts with EAGLE-3 head Other/head (known for the target, in the download cache)"
    assert greedy(llm) == greedy(loaded(target, method="plain")) and llm.stats.num_drafts > 0
    assert str(source) == chosen(target).draft
    folder = tmp_path / "any name"
    folder.mkdir()
    (folder / target.name).symlink_to(target)
    assert chosen(folder).draft == str(source)


@pytest.mark.parametrize("is_beside", ["parts", "an encoder of images"])
def test_a_draft_folder_holds_a_gguf_file_in_parts_or_with_others(made, target, is_beside):
    folder = target.parent / "draft"
    as_gguf(made / "draft", folder / "small.gguf", tensors_a_part=12 * (is_beside == "parts"))
    if is_beside != "parts":
        encoder = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
        for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
            getattr(encoder, step)()
    assert kind_of(folder) is MODEL
    found = chosen(target)
    assert (found.method, found.draft) == ("draft", str(folder))
    assert greedy(loaded(target)) == greedy(loaded(target, method="plain"))


@pytest.mark.parametrize(
    "ending",
    ["", "-Q4_K_M", ".Q8_0", "-UD-Q4_K_XL", "-IQ3_XXS", "-BF16", "-f16", "-mxfp4_moe", "-Q8_0-00001-of-00003", "-TQ1_0"],
)
def test_the_name_of_a_gguf_file_without_its_quantisation_is_the_models(ending):
    assert hub.QUANTISATION.sub("", f"Qwen2.5-7B-Instruct{ending}.gguf") == "Qwen2.5-7B-Instruct"


@pytest.mark.parametrize("is_next_to", [False, True])
def test_a_link_to_a_deleted_file_does_not_end_the_search(made, target, is_next_to):
    """To free space, users delete files of the download cache: the links to them remain."""
    dangling = copied(made / "draft", target.parent / "draft") if is_next_to else cached(made / "draft", "org/other-draft")
    (dangling / "another.safetensors").symlink_to(dangling / "gone")
    assert chosen(target).method == "draft"


def test_without_a_drafter_the_default_method_is_used(target, said):
    llm = loaded(target)
    assert llm.proposer.name == DEFAULT_METHOD == "suffix"
    assert said() == [llm.drafter] == ["drafts with suffix, because no drafter was found for the target"]
    model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(target).config)
    assert loaded(model).proposer.name == "suffix"  # drafters found for another folder are not used


def test_places_are_searched_in_order(made, tmp_path, monkeypatch):
    own = copied(made / "own", tmp_path / "models" / "Model")
    (tmp_path / "pairs.toml").write_text('["Org/Model"]\ndraft = ["Org/known"]\n')
    monkeypatch.setattr(finding, "PAIRS", tmp_path / "pairs.toml")
    # As large as "own" is small: a family member must be at most two fifths.
    monkeypatch.setattr(finding, "LARGEST", 0.9)
    beside = copied(made / "draft", own.parent / "draft")
    known, family = cached(made / "draft", "Org/known"), cached(made / "draft", "Org/family")
    found = [each.where for each in finding.candidates(finding.target_files(own)) if not each.misfit]
    assert found == [finding.OWN, finding.NEXT_TO, f"{finding.KNOWN}, in the download cache", finding.FAMILY]
    rewrite(own, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mtp_layers" in name])
    order = []
    for place in (beside, known.parents[1], family.parents[1]):
        order.append(chosen(own).draft)
        shutil.rmtree(place)
    assert order == [str(beside), str(known), str(family)] and chosen(own).method == DEFAULT_METHOD


# --- what does not fit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        ("foreign", "draft and target have different vocabularies"),
        ("cut", "cannot read .*model.safetensors"),
        ("large", "100.0% of the target's weights"),
        ("config", "config.json is not JSON"),
    ],
)
def test_a_draft_that_does_not_fit_is_logged_in_one_line(made, target, tmp_path, said, harm, expected):
    draft = target.parent / "draft"
    if harm == "foreign":
        make_folder(draft, tokenizer=make_tokenizer(300))
    else:
        copied(made / ("target" if harm == "large" else "draft"), draft)
    if harm == "cut":
        file = draft / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    if harm == "config":
        (draft / "config.json").write_text("{")
    if harm == "cut":
        assert chosen(target).method == DEFAULT_METHOD  # nothing is known of a name without a config
        return
    llm = loaded(target)
    lines = [line for line in said() if "not used" in line]
    assert llm.proposer.name == DEFAULT_METHOD and len(lines) == 1
    assert re.search(expected, lines[0]) and str(draft) in lines[0] and "\n" not in lines[0]


def test_a_truncated_sharded_draft_is_logged_in_one_line(made, target, said):
    draft = copied(made / "draft", target.parent / "draft")
    model = AutoModelForCausalLM.from_pretrained(draft)
    (draft / "model.safetensors").unlink()
    model.save_pretrained(draft, max_shard_size="10KB")
    assert chosen(target).method == "draft"
    file = max(draft.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    assert chosen(target).method == DEFAULT_METHOD
    assert any("not used: cannot read" in line and file.name in line for line in said())


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda folder: write_eagle3(folder, VOCAB, 100, config={"target_hidden_size": 48}),
         r"fc.weight has shape \[\d+, 96\], expected 144 inputs"),
        (lambda folder: write_medusa(folder, VOCAB + 1, 3), "vocabulary of 321 tokens, but .* has 320"),
        (lambda folder: write_eagle3(folder, VOCAB, 100, config={"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}),
         "but .* has 12 layers"),
    ],
)  # fmt: skip
def test_a_head_for_another_target_is_logged_and_the_next_choice_is_used(made, target, said, write, expected):
    write(target.parent / "eagle3")
    copied(made / "medusa", target.parent / "medusa1")
    found = chosen(target)
    assert Path(found.draft).name == "medusa1"
    lines = [line for line in said() if "not used" in line]
    assert len(lines) == 1 and re.search(expected, lines[0])


def test_a_misfit_found_while_building_is_logged_in_one_line(made, target, said):
    head = copied(made / "eagle3", target.parent / "eagle3")
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"] += 10_000  # tensor values are not read during the search
    save_file(tensors, head / "model.safetensors")
    assert chosen(target).method == "eagle"
    assert loaded(target).proposer.name == DEFAULT_METHOD
    assert any("not used" in line and "draft vocabulary contains token" in line for line in said())


def test_a_head_that_drafts_trees_is_used_with_a_verifier_of_chains(made, target):
    class Chains(VERIFIERS.get("rejection")):
        supports_trees = False

    copied(made / "eagle3", target.parent / "eagle3")
    found = loaded(target, verifier=Chains())
    assert found.proposer.name == "eagle" and greedy(found) == greedy(loaded(target, method="plain"))
    assert found.stats.num_drafts and not found.stats.faults


def test_hybrid_and_quantised_targets_use_drafters_that_they_support(made, target, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    hybrid = tmp_path / "hybrid"
    write_checkpoint("qwen3_5_text", hybrid, tiny_target("qwen3_5_text", vocab_size=VOCAB))
    make_tokenizer().save_pretrained(hybrid)
    assert loaded(hybrid).proposer.name == "mtp"
    copied(made / "eagle3", target.parent / "eagle3")
    rounded, plain = (loaded(target, weights="int8", method=method) for method in ("auto", "plain"))
    assert rounded.proposer.name == "eagle" and greedy(rounded) == greedy(plain)


# --- drafts named by the user -----------------------------------------------------------------------------------------------


def test_options_of_the_user_are_never_overridden(made, target, tmp_path):
    own = copied(made / "own", tmp_path / "own")
    copied(made / "eagle3", target.parent / "eagle3")
    assert loaded(own, method="ngram").proposer.name == "ngram"
    assert loaded(own, method="plain").drafter == "drafts with plain, as specified"
    assert loaded(target, method="suffix").proposer.name == "suffix"
    assert loaded(target, draft=made / "draft").proposer.name == "draft"
    assert loaded(own, method="mtp", draft=own).drafter == "drafts with mtp, as specified"
    with pytest.raises(OutriderError, match="needs an EAGLE head: use method 'draft' with it"):
        loaded(target, method="eagle", draft=made / "draft")


def test_a_named_draft_without_a_method_is_used_by_its_kind(made, target, tmp_path):
    for name, method in (("draft", "draft"), ("eagle3", "eagle"), ("eagle1", "eagle"), ("medusa", "medusa")):
        llm = loaded(target, draft=made / name)
        assert llm.proposer.name == method and llm.drafter == f"drafts with {made / name}, as specified"
    foreign = make_folder(tmp_path / "foreign", tokenizer=make_tokenizer(300))
    assert loaded(target, draft=foreign).proposer.name == "cross-tokenizer"
    with pytest.raises(OutriderError, match="vocabulary of 321 tokens"):
        write_medusa(tmp_path / "other", VOCAB + 1, 3)
        loaded(target, draft=tmp_path / "other")


def test_drafts_declared_with_the_target_precede_found_ones(made, target):
    copied(made / "draft", target.parent / "draft")
    llm = loaded(target, drafts={"eagle3": made / "eagle3", "medusa": made / "medusa"})
    assert llm.proposer.name == "eagle" and llm.drafter == "drafts with eagle3 (comes with the target)"


class Masked(DraftModelProposer):
    name = "masked"


class MaskedMethod(DraftModelMethod):
    """A more specific kind of draft model whose config has a mask token."""

    proposer = Masked
    own_draft = "masked"
    precedence = 4

    def recognise(self, folder, target):
        is_masked = folder.is_dir() and "mask_token_id" in json.loads((folder / "config.json").read_text())
        return super().recognise(folder, target) if is_masked else None


def test_a_registered_method_can_recognise_drafts_with_higher_precedence(made, target, monkeypatch):
    monkeypatch.setattr(PROPOSERS, "_entries", dict(PROPOSERS._entries))
    PROPOSERS.register("masked", MaskedMethod())
    copied(made / "draft", target.parent / "draft")
    assert chosen(target).method == "draft"
    masked = copied(made / "draft", target.parent / "masked-small")
    config = json.loads((masked / "config.json").read_text())
    (masked / "config.json").write_text(json.dumps(config | {"mask_token_id": 7}))
    found = chosen(target)
    assert (found.method, found.draft) == ("masked", str(masked))
    assert auto_choice(str(target), str(masked), {}).method == "masked"
    assert auto_choice(str(target), str(target.parent / "draft"), {}).method == "draft"


def test_a_method_without_precedence_is_never_chosen(made, target, monkeypatch):
    monkeypatch.setattr(PROPOSERS, "_entries", dict(PROPOSERS._entries))
    monkeypatch.setattr(MaskedMethod, "precedence", 0)
    PROPOSERS.register("masked", MaskedMethod())
    masked = copied(made / "draft", target.parent / "draft-small")
    config = json.loads((masked / "config.json").read_text())
    (masked / "config.json").write_text(json.dumps(config | {"mask_token_id": 7}))
    masked_only = lambda self, *_: Recognised("model", 0.1) if self.name == "masked" else None  # noqa: E731
    monkeypatch.setattr(DraftModelMethod, "recognise", masked_only)
    assert chosen(target).method == "suffix"
    assert finding._examined(target_files(target), masked, "") is None


# --- downloads --------------------------------------------------------------------------------------------------------------


def test_only_download_draft_downloads(made, target, monkeypatch, tmp_path):
    (tmp_path / "pairs.toml").write_text('["Org/model"]\ndraft = ["Org/small"]\n')
    monkeypatch.setattr(finding, "PAIRS", tmp_path / "pairs.toml")
    fetched = []

    def fetch(hub_id):
        fetched.append(hub_id)
        return cached(made / "draft", hub_id)

    monkeypatch.setattr(finding, "find_folder", fetch)
    assert loaded(target).proposer.name == "suffix" and not fetched
    llm = loaded(target, download_draft=True)
    assert llm.proposer.name == "draft" and fetched == ["Org/small"]
    assert loaded(target).proposer.name == "draft" and fetched == ["Org/small"]  # now it is in the cache


def test_an_interrupted_download_is_continued(made, target, monkeypatch, tmp_path):
    (tmp_path / "pairs.toml").write_text('["Org/model"]\ndraft = ["Org/small"]\n')
    monkeypatch.setattr(finding, "PAIRS", tmp_path / "pairs.toml")
    folder = cached(made / "draft", "Org/small")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert chosen(target).why.endswith("--download-draft fetches Org/small")

    def fetch(hub_id):
        shutil.copytree(made / "draft", folder, dirs_exist_ok=True)
        return folder

    monkeypatch.setattr(finding, "find_folder", fetch)
    assert chosen(target, download=True).method == "draft"


def test_the_kind_of_a_users_draft_is_found_without_the_targets_folder(made, tmp_path):
    (tmp_path / "heads").mkdir()
    torch.save({"0.0.linear.weight": torch.zeros(4, 4)}, tmp_path / "heads" / "medusa_lm_head.pt")
    assert finding._method_for(tmp_path / "heads" / "medusa_lm_head.pt", None) == "medusa"
    assert finding._method_for(str(tmp_path / "heads"), None) == "medusa"
    assert finding._method_for(made / "draft", None) == "draft"


def test_a_listed_drafter_with_another_tokenizer_is_neither_downloaded_nor_offered(target, monkeypatch, tmp_path):
    (tmp_path / "pairs.toml").write_text('["Org/model"]\ncross-tokenizer = ["Org/foreign"]\n')
    monkeypatch.setattr(finding, "PAIRS", tmp_path / "pairs.toml")
    monkeypatch.setattr(finding, "find_folder", lambda source: pytest.fail("it was downloaded"))
    assert loaded(target, download_draft=True).proposer.name == "suffix"
    assert "--download-draft" not in chosen(target).why


def test_a_failed_download_is_logged_in_one_line(target, monkeypatch, tmp_path, said):
    (tmp_path / "pairs.toml").write_text('["Org/model"]\ndraft = ["Org/small"]\n')
    monkeypatch.setattr(finding, "PAIRS", tmp_path / "pairs.toml")

    def fail(hub_id):
        raise OutriderError(f"cannot download {hub_id} from the hub: no such repository")

    monkeypatch.setattr(finding, "find_folder", fail)
    assert loaded(target, download_draft=True).proposer.name == "suffix"
    assert any("cannot download Org/small" in line for line in said())


# --- searching --------------------------------------------------------------------------------------------------------------


def test_searching_reads_no_weights(made, target, monkeypatch):
    for name in ("draft", "eagle3", "eagle1", "medusa"):
        copied(made / name, target.parent / name)

    def refuse(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("outrider.heads.checkpoint.torch.isfinite", refuse)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    found = list(finding.candidates(finding.target_files(target)))
    assert [each.method for each in found] == ["draft", "eagle", "eagle", "medusa"] and not any(each.misfit for each in found)
    assert all(each.num_bytes > 1000 for each in found)


def test_a_path_that_looks_like_options_is_rejected_as_a_method_option(made, tmp_path):
    for name in ("a:b", "a:b=c"):
        target = copied(made / "target", tmp_path / name / "model")
        copied(made / "draft", target.parent / "draft")
    assert loaded(target).proposer.name == "draft"
    with pytest.raises(OutriderError, match="a path with :name= cannot be an option"):
        _ = chosen(target).text
    draft = tmp_path / "a:b" / "draft"
    text = chosen(draft.with_name("model")).text
    assert split_method(text) == ("draft", {"draft": str(draft)})


# --- the table --------------------------------------------------------------------------------------------------------------


def test_the_readmes_pairs_are_those_of_the_table():
    table = finding.tomllib.loads(finding.PAIRS.read_text())
    assert all(method in PROPOSERS for by_method in table.values() for method in by_method)
    rows = re.search(r"## Your model, its drafter\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    shown, targets = 0, []
    for line in rows.splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[2]:
            targets, drafters, (method,) = cells[0] or targets, *cells[1:]
            for target in targets:  # the first ones, of which --download-draft fetches the first
                assert drafters == table[target][method][: len(drafters)] and bool(drafters) == bool(table[target][method])
                shown += 1
    assert shown > 10
