"""Exact files written for each engine; unsupported settings are rejected with an alternative."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from heads import writers
from heads.mtp_checkpoints import tiny_target
from safetensors.torch import load_file, save_file
from tiny_folder import letter_tokenizer, make_folder
from transformers import Qwen3Config

from outrider import LLM
from outrider.cli import main
from outrider.engine.plan import Plan, located
from outrider.export import ENGINES, vllm
from outrider.export.deployment import read_deployment
from outrider.export.engine import SCRIPT, TEMPERATURE_NOTE, Export, gpu_environment, write
from outrider.export.launch import working_folder
from outrider.export.transformers import Transformers
from outrider.export.vllm_adapter import KEY, TextProposer
from outrider.heads import block_formats, eagle_formats
from outrider.heads.block import BlockHead, BlockShape
from outrider.proposers.method import TargetFiles
from outrider.registry import PROPOSERS
from outrider.types import OutriderError

SIZES: dict[str, Any] = {"hidden_size": writers.HIDDEN, "num_hidden_layers": 6}
VOCAB = 320
DRAWN = {"draft_sample_method": "probabilistic"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a target and all kinds of drafts for it."""
    folder = tmp_path_factory.mktemp("models")
    make_folder(folder / "target", **SIZES)
    make_folder(folder / "draft", num_hidden_layers=1)
    make_folder(folder / "parallel", num_hidden_layers=1, pard_token=7, spd_type="pard")
    make_folder(folder / "foreign", tokenizer=letter_tokenizer(60, 3), num_hidden_layers=1)
    writers.write_eagle3(folder / "eagle3", VOCAB, 64)  # its config numbers layers in one of the two ways only
    writers.write_speculators(folder / "speculators", VOCAB, 64)
    writers.write_eagle1(folder / "eagle1", VOCAB)
    writers.write_medusa(folder / "medusa", VOCAB, 3)
    for name, kind in (("mtp", "qwen3_next"), ("mtp-llama", "llama")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": kind}))
        save_file({"mtp.fc.weight": torch.zeros(2, 4)}, folder / name / "model.safetensors")
    write_block_drafters(folder)
    return folder


def write_block_drafters(folder: Path) -> None:
    """Write z-lab's, DeepSeek's and speculators' block drafters, with and without copies of the target's tables."""
    shape = {"hidden_size": writers.HIDDEN, "intermediate_size": 24, "head_dim": 8, "vocab_size": VOCAB, "num_hidden_layers": 2}
    config = Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2)
    for name, rank in (("dflash", 0), ("dspark", 4)):
        sizes = BlockShape(config, writers.HIDDEN, (2, 4), 6, 319, VOCAB, (0, 0), predicts_next=rank > 0, markov_rank=rank)
        head = BlockHead(sizes).half()
        block_formats.export(head, folder / name, 6)
        written = json.loads((folder / name / "config.json").read_text())
        for more, tables in (("", {}), ("-tables", {"lm_head.weight": torch.zeros(VOCAB, writers.HIDDEN)})):
            place = folder / f"{name}-speculators{more}"
            place.mkdir()
            top = {"speculators_model_type": name, "aux_hidden_state_layer_ids": [2, 4], "sample_from_anchor": rank > 0}
            given = {key: written[key] for key in ("block_size",)} | {"mask_token_id": 319, "transformer_layer_config": written}
            (place / "config.json").write_text(json.dumps(top | given))
            save_file(head.state_dict() | tables, place / "model.safetensors")


@pytest.fixture
def export(models: Path, tmp_path: Path) -> Callable[..., tuple[Path, Export]]:
    """Return ``export("vllm", method="draft", num_draft_tokens=3)`` -> folder and messages."""

    def export(to: str, own_code: bool = False, **values: Any) -> tuple[Path, Export]:
        plan = Plan({"target": "target", **values}, models)
        engine = ENGINES.get(to)()
        engine.check(plan, own_code)
        return tmp_path / "out", write(engine, read_deployment(plan), tmp_path / "out", own_code)

    return export


def vllm_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((folder / "vllm.yaml").read_text())
    return settings


def test_a_full_plan_becomes_a_yaml_file_and_a_script_for_vllm(export: Any, models: Path) -> None:
    folder, said = export(
        "vllm", draft="draft", method="draft", num_draft_tokens=3, max_len=128, max_batch=8, kv_memory=1.5, dtype="float32",
        device="cuda:1", compile="never", verifier="block",
    )  # fmt: skip
    assert vllm_settings(folder) == {
        "model": str(models / "target"),
        "served-model-name": "target",
        "host": "127.0.0.1",
        "port": 8000,
        "generation-config": "vllm",
        "dtype": "float32",
        "max-model-len": 128,
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": 3 << 29,
        "enforce-eager": True,
        "speculative-config": {
            "method": "draft_model",
            "model": str(models / "draft"),
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "block",
        },
    }
    assert (folder / SCRIPT).read_text() == (
        "#!/bin/sh\n"
        "# vLLM for target: method draft, 3 drafts per round.\n"
        "# Written by outrider export; arguments are appended to the command.\n"
        "# Block verification needs vLLM's newer model runner; on a CPU it verifies token by token.\n"
        f"# {TEMPERATURE_NOTE}\n"
        "set -e\n"
        'cd "$(dirname "$0")"\n'
        "export CUDA_VISIBLE_DEVICES=1\n"
        'exec vllm serve --config vllm.yaml "$@"\n'
    )
    assert os.access(folder / SCRIPT, os.X_OK) and not said.needs_outrider


def window(least: int, most: int) -> dict[str, int]:
    return {"prompt_lookup_min": least, "prompt_lookup_max": most}


@pytest.mark.parametrize(
    ("method", "num_draft_tokens", "says"),
    [
        ("ngram:min_n=1:max_n=3", 6, {"method": "ngram", "num_speculative_tokens": 6, **window(1, 3)}),
        ("ngram", "auto", {"method": "ngram", "num_speculative_tokens": 5, **window(2, 4)}),
        ("plain", 4, None),
        ("medusa:draft=medusa", 5, {"method": "medusa", "model": "./heads", "num_speculative_tokens": 3}),
        ("mtp:draft=mtp", 2, {"method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}),
        ("dflash:draft=dflash", "auto", {"method": "dflash", "num_speculative_tokens": 5, **DRAWN}),
        ("dflash:draft=dspark", 3, {"method": "dspark", "num_speculative_tokens": 3, **DRAWN}),
        ("dflash:draft=dflash-speculators-tables", 9, {"method": "dflash", "num_speculative_tokens": 5, **DRAWN}),
        ("eagle:draft=eagle1", 2, {"method": "eagle", "model": "./heads", "num_speculative_tokens": 2, **DRAWN}),
        ("mtp:max_depth=2:draft=mtp", 5, {"method": "mtp", "num_speculative_tokens": 2, **DRAWN}),
    ],
)  # fmt: skip
def test_methods_under_vllms_names(method: str, num_draft_tokens: Any, says: Any, export: Any, models: Path) -> None:
    folder, said = export("vllm", method=in_folder(method, models), num_draft_tokens=num_draft_tokens)
    found = vllm_settings(folder).get("speculative-config")
    num_drafts = (found or {}).get("num_speculative_tokens", 0)
    assert f", {num_drafts} drafts per round." in (folder / SCRIPT).read_text().splitlines()[1]
    if says is not None and "draft_sample_method" in says:
        says = {"model": str(models / method.split("draft=")[1])} | says
    assert found == says
    assert bool([note for note in said.notes if "typical" in note]) == (num_draft_tokens == "auto")


def test_a_draft_that_reads_mask_tokens_is_vllm_s_parallel_drafting(export: Any, models: Path) -> None:
    folder, _ = export("vllm", draft="parallel", num_draft_tokens="auto")
    config = {"method": "draft_model", "model": str(models / "parallel"), "draft_sample_method": "probabilistic"}
    at_once = {"parallel_drafting": True, "num_speculative_tokens": 8}
    assert vllm_settings(folder)["speculative-config"] == config | at_once
    folder, _ = export("vllm", draft="parallel", method="draft:parallel=false", num_draft_tokens="auto")
    assert vllm_settings(folder)["speculative-config"] == config | {"num_speculative_tokens": 4}
    for to, name in (("sglang", "SGLang"), ("transformers", "transformers")):
        with pytest.raises(OutriderError, match=f"{name} cannot draft with a draft model that reads mask tokens") as error:
            export(to, draft="parallel", method="draft")
        assert "parallel=false, or export to vLLM" in str(error.value)
        export(to, draft="parallel", method="draft:parallel=false")
    with pytest.raises(OutriderError, match="names no mask token"):
        export("vllm", draft="draft", method="draft:parallel=true")


@pytest.mark.parametrize("to", ["vllm", "sglang", "transformers"])
def test_a_folders_name_is_not_executed(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder names with line breaks or shell and Python syntax are quoted: nothing is executed, and the folder is found."""
    hostile = "x\ntouch BROKEN_IN\n$(touch BROKEN_IN)`touch BROKEN_IN`'\"; touch BROKEN_IN #{0}\r\x1b[2J"
    folder = make_folder(tmp_path / hostile, **SIZES)
    draft = make_folder(tmp_path / f"{hostile} draft", num_hidden_layers=1)
    out = tmp_path / "out"
    write(
        ENGINES.get(to)(),
        read_deployment(Plan({"target": str(folder), "draft": str(draft), "method": "draft", "num_draft_tokens": 2})),
        out,
    )
    (tmp_path / "bin").mkdir()
    for program in ("vllm", "python"):  # print their arguments
        (tmp_path / "bin" / program).write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
        (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = subprocess.run([out / SCRIPT], capture_output=True, check=True, cwd=tmp_path)
    assert not list(tmp_path.rglob("BROKEN_IN")) and not done.stderr
    words = done.stdout.decode().split("\0")
    if to == "vllm":
        assert vllm_settings(out)["model"] == str(folder)
        assert vllm_settings(out)["speculative-config"]["model"] == str(draft)
    elif to == "sglang":
        assert {str(folder), str(draft), hostile} <= set(words)
    else:
        lines = ast.parse((out / words[0]).read_text()).body
        given = {ast.unparse(line.targets[0]): line.value for line in lines if isinstance(line, ast.Assign)}
        assert [ast.literal_eval(given[name]) for name in ("TARGET", "DRAFT")] == [str(folder), str(draft)]


def in_folder(method: str, models: Path) -> str:
    return method.replace("draft=", f"draft={models}/")


def test_a_draft_with_another_tokenizer_is_detected(export: Any, models: Path) -> None:
    folder, _ = export("vllm", draft="foreign", num_draft_tokens=4)
    speculative = vllm_settings(folder)["speculative-config"]
    assert speculative["use_heterogeneous_vocab"] is True and speculative["draft_sample_method"] == "greedy"
    with pytest.raises(OutriderError, match="another tokenizer"):
        export("vllm", draft="foreign", method="draft")
    with pytest.raises(OutriderError, match="SGLang needs a draft with the target's tokenizer"):
        export("sglang", draft="foreign")


@pytest.mark.parametrize("own_code", [False, True])
@pytest.mark.parametrize("method", ["suffix:min_match=3", "suffix+ngram:min_first=4", "ngram:max_n=3"])
def test_text_based_proposers_are_exported_to_vllm(method: str, own_code: bool, export: Any) -> None:
    folder, said = export("vllm", method=method, num_draft_tokens=8, own_code=own_code)
    settings = vllm_settings(folder)
    carried = own_code or not method.startswith("ngram")
    assert said.needs_outrider == carried == ("pip install --no-deps ." in (folder / SCRIPT).read_text())
    if carried:
        assert settings["additional-config"] == {KEY: {"method": method}}
        path, name = settings["speculative-config"]["model"].rsplit(".", 1)
        assert getattr(sys.modules[path], name) is TextProposer
        assert settings["speculative-config"]["method"] == "custom_class"


@pytest.mark.parametrize("source", ["eagle3", "speculators"])
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_a_head_that_an_engine_would_misread_is_converted(to: str, source: str, export: Any, models: Path) -> None:
    folder, _ = export(to, method=f"eagle:draft={models / source}:top_k=1", num_draft_tokens=3, dtype="float32")
    written = json.loads((folder / "heads" / "config.json").read_text())
    target = TargetFiles.read("target", models / "target")
    before = eagle_formats.load(models / source, target)
    assert written["eagle_aux_hidden_state_layer_ids"] == list(before.shape.hidden_states) == [1, 2, 3]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    again = eagle_formats.load(folder / "heads", target)
    assert again.shape.norm_before_residual == before.shape.norm_before_residual == (source == "speculators")
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    if to == "vllm":
        speculative = vllm_settings(folder)["speculative-config"]
        assert (speculative["method"], speculative["model"]) == ("eagle3", "./heads")


@pytest.mark.parametrize("method", ["eagle:draft={models}/speculators", "medusa:draft={models}/medusa"])
def test_an_export_that_is_run_in_place_has_absolute_paths(method: str, models: Path, tmp_path: Path) -> None:
    plan = Plan({"target": "target", "method": method.format(models=models)}, models)
    export = write(ENGINES.get("vllm")(in_place=True), read_deployment(plan), tmp_path)
    assert export.options == ("--config", str(tmp_path / "vllm.yaml"))
    assert vllm_settings(tmp_path)["speculative-config"]["model"] == str(tmp_path / "heads")


def test_a_head_with_both_layer_numberings_is_not_converted(export: Any, models: Path, tmp_path: Path) -> None:
    head = eagle_formats.load(models / "eagle3", TargetFiles.read("target", models / "target"))
    eagle_formats.export(head.half(), tmp_path / "head")
    folder, _ = export("vllm", method=f"eagle:draft={tmp_path / 'head'}", num_draft_tokens=3)
    assert vllm_settings(folder)["speculative-config"]["model"] == str(tmp_path / "head")
    assert not (folder / "heads").exists()
    folder, _ = export("vllm", method=f"eagle:draft={tmp_path / 'head'}:hidden_states=2,3,4", num_draft_tokens=3)
    written = json.loads((folder / "heads" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert load_file(folder / "heads" / "model.safetensors")["fc.weight"].dtype == torch.float16


@pytest.mark.parametrize(("to", "architecture"), [("vllm", "LlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")])
def test_engines_read_no_attention_bias_from_an_eagle1_head(
    to: str, architecture: str, export: Any, models: Path, tmp_path: Path
) -> None:
    folder, said = export(to, method=f"eagle:draft={models / 'eagle1'}:top_k=1", num_draft_tokens=3, dtype="float32")
    config = json.loads((folder / "heads" / "config.json").read_text())
    assert config["architectures"] == [architecture] and "bias" not in config
    assert torch.equal(load_file(folder / "heads" / "model.safetensors")["fc.bias"], models_bias(models / "eagle1"))
    assert any("vLLM ignores the bias" in note for note in said.notes) == (to == "vllm")
    writers.write_eagle1(tmp_path / "head", VOCAB, bias=False)
    folder, said = export(to, method=f"eagle:draft={tmp_path / 'head'}:top_k=1", num_draft_tokens=3)
    assert not any("bias" in note for note in said.notes)
    if to == "vllm":
        assert vllm_settings(folder)["speculative-config"]["model"] == str(tmp_path / "head")


def models_bias(folder: Path) -> torch.Tensor:
    bias: torch.Tensor = torch.load(folder / "pytorch_model.bin", weights_only=True)["fc.bias"]
    return bias


def test_original_medusa_heads_are_converted_for_vllm(export: Any, models: Path) -> None:
    folder, said = export("vllm", method=f"medusa:draft={models / 'medusa'}", num_draft_tokens=2)
    assert json.loads((folder / "heads" / "config.json").read_text())["num_heads"] == 3
    assert "blocks.0.layers.0.weight" in load_file(folder / "heads" / "model.safetensors")
    assert vllm_settings(folder)["speculative-config"]["num_speculative_tokens"] == 2
    assert any("chain" in note for note in said.notes)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("draft", "STANDALONE --speculative-draft-model-path {draft} --speculative-num-steps 3 --speculative-eagle-topk 1"
                  " --speculative-num-draft-tokens 4"),
        ("ngram", "NGRAM --speculative-num-draft-tokens 4"),
        ("eagle:draft={eagle1}:top_k=1", "EAGLE --speculative-draft-model-path heads --speculative-num-steps 3"
                                         " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"),
        ("mtp:draft={mtp}:top_k=1", "NEXTN --speculative-draft-model-path {mtp} --speculative-num-steps 3"
                                    " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"),
        ("dflash:draft={dflash}", "DFLASH --speculative-draft-model-path {dflash} --speculative-dflash-block-size 4"),
        ("dflash:draft={dspark}", "DSPARK --speculative-draft-model-path {dspark}"),
        ("dflash:draft={dflash-speculators}", "DFLASH --speculative-draft-model-path heads --speculative-dflash-block-size 4"),
        ("eagle:draft={eagle3}:top_k=4:max_nodes=12", "EAGLE3 --speculative-draft-model-path heads --speculative-num-steps 3"
                                                      " --speculative-eagle-topk 4 --speculative-num-draft-tokens 13"),
    ],
)  # fmt: skip
def test_methods_in_the_flags_of_sglang(options: str, flags: str, export: Any, models: Path) -> None:
    places = {name: models / name for name in ("draft", "eagle1", "eagle3", "mtp", "dflash", "dspark", "dflash-speculators")}
    draft = {"draft": "draft"} if options == "draft" else {}
    folder, said = export(
        "sglang", method=options.format(**places), num_draft_tokens=3, max_len=128, max_batch=4, device="cuda:0", **draft
    )
    assert " ".join(said.command) == (
        f"python -m sglang.launch_server --model-path {models / 'target'} --served-model-name target --host 127.0.0.1"
        " --port 8000 --device cuda --context-length 128 --max-running-requests 4"
        " --sampling-defaults openai --speculative-algorithm " + flags.format(**places)
    )
    script = (folder / SCRIPT).read_text()
    assert "export CUDA_VISIBLE_DEVICES=0\n" in script and script.endswith(f'exec {" ".join(said.command)} "$@"\n')


@pytest.mark.parametrize(
    ("method", "draft"),
    [("draft", "draft"), (None, "foreign"), ("ngram", None), ("early-exit:layers=2", None), ("plain", None)],
)
def test_the_program_for_transformers_matches_plain_decoding(
    method: str | None, draft: str | None, export: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: value for name, value in {"method": method, "draft": draft}.items() if value is not None}
    folder, _ = export("transformers", num_draft_tokens=3, dtype="float32", **given)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"max_new_tokens": 12}))
    texts = []
    for program in ((folder / "generate.py").read_text(), plain_program(folder)):
        monkeypatch.setattr(sys, "argv", ["generate.py", "def add("])
        exec(compile(program, "generate.py", "exec"), {"__name__": "__main__", "__file__": str(folder / "generate.py")})
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"
    assert (config.get("num_assistant_tokens") or config.get("prompt_lookup_num_tokens")) == (None if method == "plain" else 3)
    assert config.get("assistant_early_exit") == (2 if method and method.startswith("early") else None)


def test_the_program_for_transformers_ends_and_weighs_tokens_as_outrider_does(
    export: Any, models: Path, tmp_path: Path
) -> None:
    target = tmp_path / "chat"
    shutil.copytree(models / "target", target)
    own_config = json.loads((target / "config.json").read_text())
    own_config.pop("eos_token_id")  # the default of its class is another token
    (target / "config.json").write_text(json.dumps(own_config))
    own = {"eos_token_id": [5, 9], "repetition_penalty": 1.3, "temperature": 0.4}
    (target / "generation_config.json").write_text(json.dumps(own))
    folder, _ = export("transformers", target=str(target), method="ngram")
    config = json.loads((folder / "generation_config.json").read_text())
    assert config["eos_token_id"] == sorted(LLM(target, compile="never").engine.scheduler.eos_token_ids) and {5, 9} < set(
        config["eos_token_id"]
    )
    assert 2 not in config["eos_token_id"]
    assert config["repetition_penalty"] == 1.0 and config["do_sample"] is False
    (target / "generation_config.json").unlink()
    for stated in ({}, {"eos_token_id": [2, 9]}):
        (target / "config.json").write_text(json.dumps(own_config | stated))
        folder, _ = export("transformers", target=str(target), method="ngram")
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert ends == sorted(LLM(target, compile="never").engine.scheduler.eos_token_ids)
        assert {2, 9}.intersection(ends) == set(stated.get("eos_token_id", ()))


def plain_program(folder: Path) -> str:
    """Return the same program without drafts."""
    config = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    program = (folder / "generate.py").read_text()
    return program.replace(", assistant_model=assistant", "").replace(
        ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer", ""
    )


REFUSED = [
    ("vllm", {"method": "early-exit"}, "vLLM cannot draft with the target's own first layers .*draft model"),
    ("vllm", {"method": "low-bit"}, "vLLM cannot draft with the target's own weights in fewer bits .*draft model"),
    ("vllm", {"method": "suffix+draft", "draft": "draft"}, "vLLM cannot draft with two methods in turn .*one of the two"),
    ("vllm", {"method": "eagle:draft={models}/eagle3:top_k=4"}, "vLLM does not support trees.*top_k=1"),
    ("vllm", {"method": "mtp:draft={models}/mtp:top_k=4"}, "vLLM does not support trees.*top_k=1"),
    ("vllm", {"method": "eagle:draft={models}/eagle3:hidden_states=2,7"}, r"hidden_states \(2, 7\): expected 3 numbers"),
    ("sglang", {"method": "eagle:draft={models}/eagle3:hidden_states=2,7,99"}, "expected 3 numbers from 0 to 6"),
    ("vllm", {"method": "eagle:draft={models}/eagle1:hidden_states=2"}, "EAGLE-1 heads the last .*: remove hidden_states"),
    ("vllm", {"method": "mtp"}, "target holds no MTP head"),
    ("vllm", {"method": "mtp:draft={models}/mtp-llama"}, "no MTP heads for models of type 'llama': train an EAGLE head"),
    ("sglang", {"method": "mtp:draft={models}/mtp-llama"}, "SGLang has no MTP heads for models of type 'llama'"),
    ("vllm", {"method": "ngram", "same_text": True}, "same-text"),
    ("vllm", {"method": "ngram", "verifier": "typical"}, "does not support the verifier"),
    ("sglang", {"method": "medusa:draft={models}/medusa"}, "SGLang cannot draft with parallel heads .*EAGLE"),
    ("sglang", {"method": "suffix"}, "SGLang cannot draft with repetitions .*vLLM"),
    ("sglang", {"method": "early-exit"}, "SGLang cannot draft .*draft model"),
    ("sglang", {"method": "ngram", "verifier": "block"}, "does not support the verifier"),
    ("transformers", {"method": "suffix"}, "transformers cannot draft .*n-grams"),
    ("transformers", {"method": "eagle:draft={models}/eagle3"}, "transformers cannot draft .*vLLM"),
    (
        "sglang",
        {"method": "dflash:draft={models}/dspark-speculators-tables"},
        "output head cannot be written in z-lab's layout",
    ),
    ("vllm", {"method": "dflash:draft={models}/eagle3"}, "holds an EAGLE head, and method 'dflash' needs a block drafter"),
    ("transformers", {"method": "dflash:draft={models}/dflash"}, "transformers cannot draft with a block drafter .*vLLM"),
    ("transformers", {"method": "mtp:draft={models}/mtp"}, "transformers cannot draft with an MTP head .*vLLM"),
    ("transformers", {"method": "low-bit"}, "transformers cannot draft .*draft model"),
]


@pytest.mark.parametrize(("to", "values", "says"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_unsupported_methods_are_refused_with_an_alternative(
    to: str, values: dict[str, Any], says: str, export: Any, models: Path
) -> None:
    values = {name: value.format(models=models) if isinstance(value, str) else value for name, value in values.items()}
    with pytest.raises(OutriderError, match=says) as refused:
        export(to, **values)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "k", "expected"),
    [
        ("dflash:draft={models}/dflash", "auto", 5),
        ("dflash:draft={models}/dflash", 9, 5),
        ("dflash:draft={models}/dspark", 3, 6),
        ("eagle:draft={models}/eagle3:top_k=4:max_nodes=12", 3, 12),
        ("eagle:draft={models}/eagle3:top_k=1", "auto", 4),
        ("eagle:draft={models}/eagle3:top_k=1:max_depth=2", 5, 2),
        ("eagle:draft={models}/eagle3:top_k=2:max_nodes=60", 2, 6),  # 2 in the first step, 4 in the second
        ("plain", 4, 0),
    ],
)
def test_the_script_for_sglang_names_the_number_of_drafts_that_it_uses(
    method: str, k: int | str, expected: int, export: Any, models: Path
) -> None:
    folder, said = export("sglang", method=method.format(models=models), num_draft_tokens=k)
    assert f", {expected} drafts per round.\n" in (folder / SCRIPT).read_text() and said.num_drafts == expected
    assert any("have at most 6 drafts" in note for note in said.notes) == (expected == 6 and "eagle" in method)
    is_typical = k == "auto" and "dflash" not in method  # a block drafter makes its whole block
    assert [note.split()[0] for note in said.notes if "typical" in note] == ([str(expected)] if is_typical else [])


@pytest.mark.parametrize(
    ("to", "method", "k", "note"),
    [
        ("transformers", "ngram", "auto", "5 drafts per round is a typical number: measure yours."),
        ("sglang", "dflash:draft={models}/dflash", "auto", "SGLang drafts the head's whole blocks: 5 tokens."),
        ("vllm", "draft:draft={models}/draft:bits=16", 4, "options of the method are Outrider's and are not exported: bits."),
    ],
)
def test_what_an_engine_does_otherwise_is_noted_in_the_script(
    to: str, method: str, k: int | str, note: str, export: Any, models: Path
) -> None:
    folder, said = export(to, method=method.format(models=models), num_draft_tokens=k)
    assert note in (folder / SCRIPT).read_text() and [each for each in said.notes if note in each]
    _, said = export(to, method=method.format(models=models).removesuffix(":bits=16"), num_draft_tokens=4)
    assert not [each for each in said.notes if note in each]


def test_settings_that_transformers_lacks_are_noted(export: Any) -> None:
    settings = {"max_len": 128, "max_batch": 4, "kv_memory": 1.5, "compile": "auto"}
    _, said = export("transformers", method="ngram:min_n=2", **settings)
    assert [note for note in said.notes if note.endswith("they are not exported: max_len, max_batch, kv_memory, min_n.")]
    _, said = export("transformers", method="ngram", compile="never")
    assert not [note for note in said.notes if "not exported" in note]


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_the_other_default_temperature_is_noted(to: str, export: Any) -> None:
    folder, said = export(to, method="ngram")
    note = next(note for note in said.notes if "temperature" in note)
    assert "1.0" in note and f"# {note}" in (folder / SCRIPT).read_text()


@pytest.mark.parametrize("method", ["mtp:draft={models}/mtp", "mtp:draft={models}/mtp:top_k=4"])
def test_chains_are_exported_for_a_target_with_recurrent_layers(method: str, export: Any, models: Path, tmp_path: Path) -> None:
    """Outrider itself drafts chains there, whatever the options of the tree are."""
    tiny_target("qwen3_next").save_pretrained(tmp_path / "recurrent")
    plan = {"target": str(tmp_path / "recurrent"), "method": method.format(models=models), "num_draft_tokens": 3}
    folder, said = export("vllm", **plan)
    assert vllm_settings(folder)["speculative-config"]["num_speculative_tokens"] == 3
    assert not [note for note in said.notes if "tree" in note]
    shutil.rmtree(folder)
    _, said = export("sglang", **plan)
    assert " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in " ".join(said.command)


@pytest.mark.parametrize(("k", "expected"), [(2, 2), (5, 3), (6, 6)])
def test_an_mtp_head_of_several_layers_gets_a_multiple_of_them(
    k: int, expected: int, export: Any, models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "mtp", tmp_path / "mtp")
    config = {"model_type": "qwen3_next", "num_nextn_predict_layers": 3}
    (tmp_path / "mtp" / "config.json").write_text(json.dumps(config))
    folder, said = export("vllm", method=f"mtp:draft={tmp_path / 'mtp'}", num_draft_tokens=k)
    assert vllm_settings(folder)["speculative-config"]["num_speculative_tokens"] == expected
    assert any("K = 3 instead of 5" in note for note in said.notes) == (k == 5)


@pytest.mark.parametrize("name", ["plain", "\u6a21\u578b", "\U0001f680", "a\u2028b\x85", "\udcff"])
def test_a_name_in_any_script_is_read_back_from_the_yaml_file(name: str) -> None:
    text = vllm.yaml({"model": name})
    assert yaml.safe_load(text) == {"model": name}
    text.encode()


def test_refused_settings_leave_no_folder(export: Any, tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="same-text"):
        export("vllm", method="ngram", same_text=True)
    with pytest.raises(OutriderError, match="cannot draft with"):
        export("vllm", method="early-exit")
    assert not (tmp_path / "out").exists()


def test_plain_decoding_is_exported_as_plain_decoding(models: Path, tmp_path: Path) -> None:
    assert (
        main(
            [
                "export",
                "--to",
                "vllm",
                "--target",
                str(models / "target"),
                "-k",
                "0",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert "speculative-config" not in vllm_settings(tmp_path / "out")


def test_different_servers_have_different_folders(models: Path) -> None:
    one, other = (read_deployment(Plan({"target": "target", "method": "ngram", "num_draft_tokens": k}, models)) for k in (2, 3))
    engine = ENGINES.get("vllm")()
    folders = {working_folder(engine, each, own_code) for each in (one, other) for own_code in (False, True)}
    assert len(folders) == 4 and working_folder(engine, one, False) in folders


def test_own_code_is_refused_for_other_methods(export: Any) -> None:
    with pytest.raises(OutriderError, match="not text-based"):
        export("vllm", draft="draft", own_code=True)
    with pytest.raises(OutriderError, match="does not support custom proposers"):
        export("sglang", method="ngram", own_code=True)


def test_every_method_has_a_portable_description() -> None:
    from outrider.proposers.method import Setting
    from outrider.proposers.portable import Form

    setting = Setting.without_target(draft="owner/name", drafts={"medusa": "owner/heads", "eagle3": "owner/head"})
    kinds = {name: PROPOSERS.get(name).portable(setting) for name in PROPOSERS if not PROPOSERS.get(name).takes_draft}
    kinds |= {name: PROPOSERS.get(name).portable(setting) for name in PROPOSERS if PROPOSERS.get(name).takes_draft}
    assert set(kinds) == set(PROPOSERS)
    assert all(kind.form is not Form.CUSTOM and kind.form.what for kind in kinds.values())


def test_the_command_writes_a_folder_and_names_its_script(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(
        f'target = "{models / "target"}"\nmethod = "ngram"\nnum_draft_tokens = 2\nmax_batch = 5\n'
    )
    assert main(["export", "plan.toml", "--to", "vllm", "-k", "7"]) == 0
    said = capsys.readouterr()
    assert said.out == "outrider-vllm/run.sh\n" and "earliest match" in said.err
    assert vllm_settings(tmp_path / "outrider-vllm")["speculative-config"]["num_speculative_tokens"] == 7
    assert vllm_settings(tmp_path / "outrider-vllm")["max-num-seqs"] == 5  # no option of this command
    assert main(["export", "plan.toml", "--to", "vllm"]) == 0  # an earlier export is replaced
    assert vllm_settings(tmp_path / "outrider-vllm")["speculative-config"]["num_speculative_tokens"] == 2
    capsys.readouterr()
    assert main(["export", "plan.toml", "--to", "tgi"]) == 2
    assert "known: vllm, sglang, transformers" in capsys.readouterr().err


@pytest.mark.parametrize("script", [None, "#!/bin/sh\n# vLLM for me: mine\n", "an export to another engine"])
def test_a_folder_with_other_files_is_not_written_to(
    script: str | None, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    command = ["export", "--target", str(models / "target"), "--method", "ngram", "--out", str(folder), "--to"]
    if script == "an export to another engine":
        assert main([*command, "sglang"]) == 0
        (folder / "generate.py").write_text("mine")
    else:
        folder.mkdir()
        (folder / "generate.py").write_text("mine")
        if script is not None:
            (folder / SCRIPT).write_text(script)
    before = {file.name: file.read_text() for file in folder.iterdir()}
    capsys.readouterr()
    assert main([*command, "vllm"]) == 2
    assert f"{folder} contains files other than an export to vLLM: give another folder" in capsys.readouterr().err
    assert {file.name: file.read_text() for file in folder.iterdir()} == before


@pytest.mark.parametrize(("visible", "expected"), [(None, "1"), ("2,3", "3"), ("GPU-1a, GPU-2b", "GPU-2b")])
def test_a_gpu_is_counted_among_those_that_the_process_sees(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": expected}
    assert gpu_environment("cpu") == gpu_environment("cuda") == gpu_environment(None) == {}


@pytest.mark.parametrize(("visible", "count"), [("2", 1), ("", 0)])
def test_a_gpu_that_the_process_does_not_see_is_refused(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(OutriderError, match=f"invalid device cuda:1: CUDA_VISIBLE_DEVICES={visible} shows {count} GPUs"):
        gpu_environment("cuda:1")


def test_a_gguf_file_keeps_its_place_in_an_export_and_is_refused_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert located("m.gguf") == str(file)
    assert Plan({"target": "m.gguf"}, tmp_path).given("target") == str(file)
    for target, draft in ((str(file), "d"), ("t", str(file))):
        given: Any = SimpleNamespace(target=target, kind=SimpleNamespace(source=draft))
        with pytest.raises(OutriderError, match="loads folders"):
            Transformers().export(given, tmp_path, False)


def test_vllm_needs_a_package_for_gguf_files(export: Any, models: Path) -> None:
    for name in ("m.gguf", "m-00001-of-00002.gguf"):
        (models / name).write_bytes(b"GGUF")
    _, said = export("vllm", target="m.gguf", method="suffix")
    assert any("pip install vllm-gguf-plugin" in note for note in said.notes)
    with pytest.raises(OutriderError, match="on GPUs only"):
        export("vllm", target="m.gguf", method="suffix", device="cpu")
    with pytest.raises(OutriderError, match="join those"):
        export("vllm", target="m-00001-of-00002.gguf", method="suffix")
