"""Downloads from a hub on this machine: only the files that are loaded, refusals before the weights, and the cache."""

from __future__ import annotations

import errno
import json
import logging
import re
import time
from concurrent.futures import Future
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
from hub_server import Hub, running
from huggingface_hub import constants

from outrider import LLM, family, hub
from outrider.cli import main, session
from outrider.cli.tune import movable
from outrider.engine import finding
from outrider.engine.plan import located, served_name
from outrider.errors import OutriderError
from outrider.hub import refuse_missing
from outrider.method_text import split_method
from outrider.proposers.method import Setting
from outrider.registry import PROPOSERS
from outrider.runner.loading import load_config

INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
SHARDS = {"model-00001-of-00002.safetensors": b"one", "model-00002-of-00002.safetensors": b"two"}
CONFIGS = {"config.json": b"{}", "tokenizer.json": b"{} ", "chat_template.jinja": b"template", "merges.txt": b"a b"}
DUPLICATES = {
    "original/consolidated.00.pth": b"x",
    "original/params.json": b"y",
    "consolidated.safetensors": b"z",
    "model.gguf": b"g",
    "pytorch_model.bin": b"p",
    "onnx/model.onnx": b"o",
    "tf_model.h5": b"t",
    "README.md": b"r",
    "figures/a.png": b"f",
}
SHARDED = CONFIGS | SHARDS | DUPLICATES | {"model.safetensors.index.json": INDEX.encode()}


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Provide a hub, and an empty download cache."""
    with running(Hub({"a/sharded": SHARDED})) as there:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for name, value in {
            "ENDPOINT": there.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": there.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        forget()
        yield there
        forget()


def forget():
    """Begin as a new process does."""
    hub._listed.cache_clear()


def test_only_the_files_that_are_loaded_are_downloaded_once(served):
    folder = hub.fetch("a/sharded")
    wanted = [*CONFIGS, *SHARDS, "model.safetensors.index.json"]
    assert sorted(served.sent) == sorted(wanted)
    assert sorted(each.name for each in folder.iterdir()) == sorted(wanted)
    forget()
    served.asked.clear()
    assert hub.fetch("a/sharded") == folder
    assert served.asked == ["/api/models/a/sharded"]


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({"pytorch_model.bin": b"1", "tf_model.h5": b"2"}, ["pytorch_model.bin"]),
        ({"model.safetensors": b"1", "pytorch_model.bin": b"2", "metal/model.bin": b"3"}, ["model.safetensors"]),
        ({"medusa_lm_head.pt": b"1", "other.bin": b"2"}, ["medusa_lm_head.pt"]),
        (
            {"config.json": b'{"transformers_weights": "own.safetensors"}', "own.safetensors": b"1", "model.safetensors": b"2"},
            ["own.safetensors"],
        ),
    ],
)
def test_weights_are_downloaded_in_one_format(files, wanted, served):
    served.repositories["a/model"] = CONFIGS | files
    hub.fetch_weights("a/model")
    assert served.sent == ["config.json", *wanted]


@pytest.mark.parametrize(
    "files, said",
    [
        ({"adapter_config.json": b"{}"}, "it is an adapter"),
        ({"model_index.json": b"{}"}, "it is a diffusion model"),
        ({"model.gguf": b""}, "GGUF files only"),
        ({"consolidated.00.pth": b""}, "in the authors' own format"),
        ({"consolidated.safetensors": b"", "params.json": b"{}"}, "in the authors' own format"),
        ({"README.md": b""}, "it has no config.json"),
    ],
)
def test_a_repository_without_a_model_is_refused_before_any_download(files, said, served):
    served.repositories["a/other"] = files
    with pytest.raises(OutriderError, match=rf"a/other is not a model that can be loaded: .*{said}"):
        hub.fetch("a/other")
    assert not served.sent


def test_weights_of_an_unknown_format_are_refused(served):
    served.repositories["a/pth"] = CONFIGS | {"model.pth": b"1"}
    with pytest.raises(
        OutriderError, match=r"a/pth has no weights in a known format: expected model.safetensors or pytorch_model.bin"
    ):
        hub.fetch("a/pth")


@pytest.mark.parametrize(
    "files, said",
    [
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"}, "it is an adapter"),
        ({"openvino_model.xml": b"", "openvino_model.bin": b"1", "openvino_tokenizer.bin": b"2"}, "for ONNX or OpenVINO"),
        ({"onnx/model_q4.onnx": b"1"}, "for ONNX or OpenVINO"),
        ({"model.gguf": b"1"}, "GGUF files only"),
        ({"head.safetensors": b"1", "model-00001-of-00002.safetensors": b"2"}, "expected model.safetensors or"),
        ({"gptq_model-4bit-128g.safetensors": b"1"}, "expected model.safetensors or"),
        ({"consolidated.safetensors": b"1", "params.json": b"{}"}, "in the authors' own format"),
    ],
)
def test_weights_that_are_not_transformers_are_named_and_not_downloaded(files, said, served):
    served.repositories["a/other"] = files | CONFIGS
    with pytest.raises(OutriderError, match=f"a/other has no weights in a known format: .*{said}"):
        hub.fetch("a/other")
    assert served.sent == ["config.json"]


@pytest.mark.parametrize("shard", ["*", "model-00003-of-00002.safetensors"])
def test_a_shard_that_the_repository_lacks_is_refused_before_any_weights(shard, served):
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": shard}})
    served.repositories["a/sharded"] = SHARDED | {"model.safetensors.index.json": index.encode()}
    with pytest.raises(OutriderError) as error:
        hub.fetch_weights("a/sharded")
    assert str(error.value).startswith(f"a/sharded lacks {shard}, which its model.safetensors.index.json names: ")
    assert served.sent == ["config.json", "model.safetensors.index.json"]


def test_names_of_files_are_no_patterns(served):
    index = json.dumps({"weight_map": {"a": "model[12].safetensors"}}).encode()
    files = {"model[12].safetensors": b"a", "model1.safetensors": b"b", "model.safetensors.index.json": index}
    served.repositories["a/brackets"] = CONFIGS | files
    hub.fetch_weights("a/brackets")
    assert served.sent == ["config.json", "model.safetensors.index.json", "model[12].safetensors"]


def test_another_revision_is_refused_with_the_command_that_downloads_it():
    said = r"'a/sharded@v1': .*only the branch main is used: .*hf download a/sharded --revision v1 --local-dir FOLDER"
    with pytest.raises(OutriderError, match=said):
        refuse_missing("a/sharded@v1")
    with pytest.raises(OutriderError, match=r"expected a folder, a .gguf file or a Hugging Face id owner/name$"):
        refuse_missing("a b")


def test_a_draft_that_exceeds_the_memory_is_refused_before_its_download(served, monkeypatch):
    monkeypatch.setattr("outrider.memory.total_memory", lambda: 5)
    with pytest.raises(OutriderError, match=r"the weights of a/sharded take .* of memory"):
        hub.fetch("a/sharded")
    assert not {*SHARDS} & {*served.sent}


def test_names_that_do_not_exist_gated_models_and_rate_limits_say_what_to_do(served):
    with pytest.raises(OutriderError, match="no model 'a/nothing' on the Hugging Face hub: check owner and name"):
        hub.fetch("a/nothing")
    served.gated.add("a/sharded")
    with pytest.raises(OutriderError, match=f"a/sharded is gated: ask for access at {served.url}/a/sharded, then log in"):
        hub.fetch("a/sharded")
    for status, said in {
        429: "limits your requests",
        401: "does not accept your token",
        500: "answers with status 500",
    }.items():
        forget()
        served.failure = status
        with pytest.raises(OutriderError, match=said):
            hub.fetch("a/sharded")


def test_weights_that_exceed_memory_or_disk_are_refused_before_their_download(served):
    served.sizes["model-00001-of-00002.safetensors"] = 1 << 58
    with pytest.raises(OutriderError, match=r"the weights of a/sharded take .* of memory: choose a smaller"):
        hub.fetch_weights("a/sharded", growth=1.0)
    with pytest.raises(OutriderError, match=r"downloading a/sharded takes .* of free disk space: delete files, or set HF_HOME"):
        hub.fetch_weights("a/sharded")
    assert served.sent == ["config.json", "model.safetensors.index.json"]


def test_weights_in_the_cache_are_measured_when_they_are_loaded(served, monkeypatch):
    """An upper bound refuses what fits."""
    hub.fetch("a/sharded")
    monkeypatch.setattr("outrider.memory.total_memory", lambda: 5)
    hub.fetch_weights("a/sharded", growth=4.0)


def test_with_a_failing_hub_the_cache_is_used_without_further_requests(served):
    folder = hub.fetch("a/sharded")
    assert not hub.is_cached_only("a/sharded")
    forget()
    served.failure = 503
    served.asked.clear()
    assert hub.fetch("a/sharded") == folder and hub.is_cached_only("a/sharded")
    assert len(served.asked) == 1


@pytest.mark.parametrize("failure", ["read-only", "gated", "midway"])
def test_if_a_new_commit_cannot_be_downloaded_the_cached_one_is_used(failure, served, monkeypatch, caplog):
    folder = hub.fetch("a/sharded")
    forget()
    monkeypatch.setattr(hub_server, "COMMIT", "d0" * 20)
    if failure == "read-only":
        monkeypatch.setattr(hub, "_snapshot", refused)
    elif failure == "gated":
        served.gated.add("a/sharded")
    else:
        hub._listed("a/sharded")
        served.failure = 403
    assert hub.fetch("a/sharded") == folder and hub.is_cached_only("a/sharded")
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().endswith("; the files in the download cache are used")


def refused(*_):
    raise OSError(errno.EROFS, "read-only file system")


def test_small_files_that_a_read_only_cache_lacks_are_optional(served, monkeypatch):
    folder = hub.fetch("a/sharded")
    forget()
    served.repositories["a/sharded"] = SHARDED | {"added_tokens.json": b"{}"}
    monkeypatch.setattr(hub, "_snapshot", refused)
    assert hub.fetch("a/sharded") == folder
    forget()
    (folder / "config.json").unlink()
    with pytest.raises(OutriderError, match="cannot write to the download cache"):
        hub.fetch("a/sharded")


def test_files_of_an_older_commit_that_are_the_same_need_no_space(served, monkeypatch):
    hub.fetch("a/sharded")
    forget()
    monkeypatch.setattr(hub_server, "COMMIT", "d0" * 20)
    served.sizes["model-00001-of-00002.safetensors"] = 1 << 58
    served.sent.clear()
    hub.fetch_weights("a/sharded")
    assert not served.sent
    assert hub._newest_snapshot("a/sharded").name == "d0" * 20


def test_with_a_failing_hub_a_cached_gguf_file_is_used(served):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    file = hub.local_gguf("a/b-GGUF")
    forget()
    served.failure = 503
    assert hub.local_gguf("a/b-GGUF") == file


def test_an_unreachable_hub_is_named_and_a_cached_model_is_used(served, monkeypatch):
    folder = hub.fetch("a/sharded")
    forget()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert hub.fetch("a/sharded") == folder and hub.is_cached_only("a/sharded") and hub.is_offline("a/sharded")
    with pytest.raises(OutriderError, match=r"^no model 'a/other': .* nor in the download cache, and .* is unreachable or"):
        hub.fetch("a/other")


@pytest.mark.parametrize("command", [["doctor"], ["generate", "hi"]], ids=str)
def test_an_unreachable_hub_is_one_line_of_a_command(command, served, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert main([*command, "--target", "a/sharded"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no model 'a/sharded': it is neither a local folder nor")


def test_after_an_unreachable_hub_a_command_is_offline(served, monkeypatch):
    hub.fetch("a/sharded")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    session.check_source("a/sharded")
    assert not constants.HF_HUB_OFFLINE
    forget()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    session.check_source("a/sharded")
    assert constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("url", ["http://host:abc", "huggingface.co"])
def test_an_invalid_address_of_the_hub_is_refused_in_one_line(url, served, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    with pytest.raises(OutriderError, match=rf"^HF_ENDPOINT={re.escape(url)} is not a URL such as https://huggingface\.co: "):
        hub.fetch("a/sharded")


def test_a_gguf_file_that_does_not_exist_is_not_searched_on_the_hub(served, capsys):
    with pytest.raises(OutriderError, match=r"no model folder 'models/x.gguf': expected a folder, a .gguf file"):
        LLM("models/x.gguf")
    assert main(["generate", "hi", "--target", "models/x.gguf"]) == 2
    assert "no model folder 'models/x.gguf': expected a folder, a .gguf file" in capsys.readouterr().err.splitlines()[-1]
    assert not served.asked


@pytest.mark.parametrize(
    "source", ["https://huggingface.co/a/b", "a/b/", "a/b:latest", "a/b@v1", "a b", "./a", "", None, "a/b/c", "a/b.gguf"]
)
def test_other_sources_are_no_hub_ids(source):
    assert not hub.is_hub_id(source)


def test_the_method_of_a_users_draft_is_known_at_its_first_use(served):
    served.repositories["a/heads"] = {"config.json": b"{}", "medusa_lm_head.safetensors": safetensors("0.0.linear.weight")}
    assert finding._method_for("a/heads", None) == "medusa"


def test_loading_refuses_before_the_weights_and_uses_the_cache_of_a_failing_hub(served):
    files = {name: (family.TARGET / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    weights = (family.TARGET / "model.safetensors").read_bytes()
    served.repositories |= {"a/large": files | {"model.safetensors": b"x"}, "a/good": files | {"model.safetensors": weights}}
    served.sizes["model.safetensors"] = 1 << 58
    with pytest.raises(OutriderError, match="no model 'a/nothing' on the Hugging Face hub"):
        LLM("a/nothing")
    with pytest.raises(OutriderError, match="the weights of a/large take"):
        LLM("a/large")
    assert "model.safetensors" not in served.sent
    served.sizes.clear()
    LLM("a/good", self_check=False)
    assert served.sent.count("model.safetensors") == 1
    forget()
    served.failure = 503
    served.asked.clear()
    LLM("a/good", self_check=False)
    assert len(served.asked) == 1


def safetensors(name: str) -> bytes:
    """Return a file with one number."""
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def test_an_interrupt_ends_the_download_at_the_next_bytes(served, monkeypatch):
    states = []

    def download(repository, allow_patterns, tqdm_class):
        bar = tqdm_class(disable=True)
        try:
            while True:
                bar.update(1)
                time.sleep(0.01)
        except InterruptedError:
            states.append("ended")
            raise

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub._snapshot("a/sharded", ["config.json"])
    assert states == ["ended"]


def test_a_download_logs_its_progress(served, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(hub, "PERIOD", 0.05)
    blobs = tmp_path / "cache" / "models--a--slow" / "blobs"
    blobs.mkdir(parents=True)
    with caplog.at_level(logging.INFO, "outrider.hub"), hub._shown("a/slow", 4_000_000):
        (blobs / "x.incomplete").write_bytes(bytes(1_000_000))
        time.sleep(0.3)
    lines = [record.getMessage() for record in caplog.records if getattr(record, "is_progress", False)]
    assert lines and lines[-1].startswith("downloading a/slow: 1 MB of 4 MB, about ") and lines[-1].endswith(" left")


def test_without_the_hub_an_incomplete_download_is_named(served):
    hub.fetch_configs("a/sharded")
    forget()
    served.failure = 503
    with pytest.raises(OutriderError, match=r"the weights of a/sharded are not in the download cache.*hf download a/sharded$"):
        hub.fetch_weights("a/sharded")


def test_without_the_hub_a_download_that_lacks_a_shard_is_named(served):
    folder = hub.fetch("a/sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    forget()
    served.failure = 503
    with pytest.raises(
        OutriderError, match=r"the weights of a/sharded are not in the download cache, and .* hub fails: download"
    ):
        hub.fetch_weights("a/sharded")


def test_the_config_of_a_hub_id_is_checked(served):
    served.repositories["a/odd"] = SHARDED | {"config.json": b'{"model_type": "llama", "torch_dtype": "bf16"}'}
    with pytest.raises(OutriderError, match="says dtype='bf16': expected a dtype such as bfloat16"):
        load_config("a/odd")


@pytest.mark.parametrize("draft", ["a/nothing", "a/gated", "a/onnx"])
def test_a_draft_that_cannot_be_loaded_is_refused_before_the_target_is_downloaded(draft, served, capsys, tmp_path):
    served.repositories |= {"a/gated": SHARDED, "a/onnx": CONFIGS | {"onnx/model.onnx": b"1", "onnx.json": b"{}"}}
    served.gated.add("a/gated")
    with pytest.raises(OutriderError, match=draft):
        LLM("a/sharded", draft=draft)
    export = ["export", "--to", "vllm", "--method", "draft", "--out", str(tmp_path / "out")]
    for command in (["doctor"], ["generate", "hi"], export):
        assert main([*command, "--target", "a/sharded", "--draft", draft]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and draft in error
    assert not {*SHARDS, "onnx.json"} & {*served.sent}


WRONG = [
    ["generate", "hi", "--method", "nonsense"],
    ["generate", "hi", "--method", "suffix:nonsense=1"],
    ["generate", "hi", "--temperature", "-1"],
    ["generate", "hi", "--dtype", "nonsense"],
    ["generate", "hi", "--draft", "a/nothing"],
    ["generate", "hi", "--draft", "a/b-GGUF:F16"],
    ["generate", "hi", "--method", "draft:draft=a/nothing"],
    ["chat", "hi", "--max-len", "0"],
    ["compare", "hi", "--inflate", "1b"],
    ["bench", "--method", "auto,nonsense"],
    ["bench", "--batch", "0"],
    ["bench", "--inflate", "1b"],
    ["audit", "--method", "auto,nonsense"],
    ["audit", "--prompts", "missing.txt"],
    ["tune", "--workloads", "code", "--method", "auto,nonsense"],
    ["tune", "--workloads", "code", "--method", "auto,plain"],
    ["tune", "--traffic", "missing.jsonl"],
    ["doctor", "--method", "nonsense"],
    ["doctor", "--temperature", "-1"],
    ["export", "--to", "vllm", "--method", "suffix:nonsense=1"],
    ["export", "--to", "vllm", "--verifier", "typical"],
    ["export", "--to", "vllm", "--same-text"],
    ["serve", "--method", "nonsense", "--port", "0"],
    ["demo", "--method", "auto,nonsense", "--port", "0"],
]


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_a_wrong_option_is_refused_before_a_gguf_file_is_downloaded(command, served, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    assert main([*command, "--target", "a/b-GGUF"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not served.sent


def test_a_wrong_key_of_a_plan_is_refused_before_its_gguf_files_are_downloaded(served, tmp_path):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    plan = tmp_path / "plan.toml"
    plan.write_text('target = "a/b-GGUF"\ndraft = "a/b-GGUF:Q8_0"\nmethod = "suffix:nonsense=1"\n')
    for command in (["serve", str(plan), "--port", "0"], ["export", str(plan), "--to", "vllm", "--out", str(tmp_path / "out")]):
        assert main(command) == 2
    assert not served.sent


@pytest.mark.parametrize(
    "option",
    [{"method": "nonsense"}, {"method": "draft:nonsense=1"}, {"max_len": 0}, {"draft": "a/nothing"}, {"draft": "a/b-GGUF:F16"}],
    ids=str,
)
def test_a_wrong_argument_is_refused_before_a_gguf_file_is_downloaded(option, served):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    for models in ({"model": "a/b-GGUF"}, {"model": "a/b-GGUF", "draft": "a/b-GGUF"}):
        with pytest.raises(OutriderError):
            LLM(**models | option)
    assert not served.sent


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_a_gguf_file_that_exceeds_the_memory_is_refused_before_its_download(option, served, capsys):
    served.repositories["a/b-GGUF"] = {"b-Q8_0-00001-of-00002.gguf": b"1", "b-Q8_0-00002-of-00002.gguf": b"2"}
    served.sizes = dict.fromkeys(served.repositories["a/b-GGUF"], 1 << 57)
    said = "the weights of a/b-GGUF take 288230376.2 GB, but this process has "
    with pytest.raises(OutriderError, match=said):
        LLM("a/b-GGUF") if option == "--target" else LLM(draft="a/b-GGUF")
    for command in (["generate", "hi"], ["bench"], ["doctor"]):
        assert main([*command, option, "a/b-GGUF"]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    assert not served.sent


def test_an_export_may_exceed_the_memory_of_this_machine(served, monkeypatch, tmp_path):
    monkeypatch.setattr("outrider.memory.total_memory", lambda: 0)
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    assert main(["export", "--target", "a/b-GGUF", "--method", "plain", "--to", "vllm", "--out", str(tmp_path / "out")]) == 0
    assert served.sent == ["b-Q8_0.gguf"]


def test_a_gguf_file_of_the_cache_keeps_its_name_in_plans_and_servers(served):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    file = hub.local_gguf("a/b-GGUF")
    assert located(file) == file and served_name(file) == "b-Q8_0.gguf"


@pytest.mark.parametrize("name", ["b-Q8_0.gguf", "Q8_0/b-Q8_0-00001-of-00002.gguf"])
def test_a_plan_names_a_gguf_file_of_the_cache_by_its_hub_id(name, served):
    second = name.replace("00001", "00002")
    served.repositories["a/b-GGUF"] = {name: b"1", second: b"2", "b-F16.gguf": b"3"}
    file = hub.local_gguf("a/b-GGUF:Q8_0")
    assert movable(file) == f"a/b-GGUF:{name}" and hub.local_gguf(movable(file)) == file


def test_a_plan_names_a_gguf_file_of_an_older_revision_by_its_path(served):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    file = Path(hub.local_gguf("a/b-GGUF"))
    refs = file.parents[2] / "refs" / "main"
    refs.write_text("d0" * 20)
    assert movable(str(file)) == str(file)


@pytest.mark.parametrize("source", ["a/b-GGUF", "a/b-GGUF:Q8_0", "a/b-GGUF:b-Q8_0.gguf"])
def test_an_id_of_a_gguf_file_means_the_same_as_draft_of_a_method(source, served):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1", "b-F16.gguf": b"2"}
    name, options = split_method(f"draft:draft={source}:seed=1")
    assert options == {"draft": source, "seed": "1"}
    setting = Setting.without_target(draft=None, options={"draft": source}, drafts={})
    assert str(setting.with_draft_of(PROPOSERS.get(name)).draft) == hub.local_gguf(source)
    assert served.sent == ["b-Q8_0.gguf"]


def test_a_plan_with_an_id_of_a_gguf_file_is_exported(served, tmp_path):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    plan = tmp_path / "plan.toml"
    plan.write_text('target = "a/b-GGUF:Q8_0"\nmethod = "plain"\n')
    assert main(["export", str(plan), "--to", "vllm", "--out", str(tmp_path / "out")]) == 0
    assert f'model: "{hub.local_gguf("a/b-GGUF")}"' in (tmp_path / "out" / "vllm.yaml").read_text()


def test_training_of_a_model_refuses_a_gguf_file_before_its_download_and_heads_take_it(served, capsys, tmp_path):
    served.repositories["a/b-GGUF"] = {"b-Q8_0.gguf": b"1"}
    (tmp_path / "text.txt").write_text("text")
    options = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    for models in (["--target", "a/b-GGUF:Q8_0"], ["--target", "a/sharded", "--start", "a/b-GGUF:Q8_0"]):
        assert main(["train", "draft", *models, *options]) == 2
        assert "error: a/b-GGUF:Q8_0 is a GGUF file: training a model or draft needs" in capsys.readouterr().err
    assert not served.sent
    assert main(["train", "medusa", "--target", "a/b-GGUF:Q8_0", *options]) == 2  # the file is not a GGUF file
    assert served.sent == ["b-Q8_0.gguf"]


def test_a_cache_folder_that_is_a_file_is_named(served, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(OutriderError, match=r"cannot write to the download cache .*file/hub: set HF_HOME to a folder"):
        hub.fetch("a/sharded")


def test_a_folder_without_a_model_that_hides_a_hub_id_is_named(served, monkeypatch, capsys, tmp_path):
    (tmp_path / "a" / "sharded").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--target", "a/sharded", "hi"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "config.json is missing; for the hub id a/sharded, rename the folder of that name" in error
