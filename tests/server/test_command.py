"""``outrider serve``: plans, errors, and a process from its first log line to a signal."""

from __future__ import annotations

import json
import logging
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from pydantic import ValidationError

from outrider import SamplingParams, native
from outrider.cli import main
from outrider.cli.options import MethodOptions, ModelOptions
from outrider.cli.serve import LimitOptions, filled, joined
from outrider.engine.llm import LLM
from outrider.engine.plan import KEYS, Plan, served_name
from outrider.server import run
from outrider.server.completions import CompletionBody
from outrider.server.config import Client, KeyRing, ServerConfig
from outrider.server.messages import MessagesBody
from outrider.server.mistakes import mistakes
from outrider.server.protocol import ChatBody
from outrider.server.responses import ResponseBody
from outrider.types import OutriderError

from .served import Served, serving_process

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
VALUES: dict[str, Any] = {
    "target": "owner/name",
    "draft": 'C:\\a "b"',
    "download_draft": True,
    "method": "draft",
    "num_draft_tokens": "auto",
    "verifier": "block",
    "same_text": True,
    "max_batch": 16,
    "max_len": 512,
    "kv_memory": 1.5,
    "dtype": "float32",
    "device": "cpu",
    "compile": "never",
    "weights": "int8",
    "grammar_drafts": False,
}


def test_a_plan_survives_writing_and_reading(tmp_path: Path) -> None:
    assert set(VALUES) == set(KEYS)
    Plan(VALUES).write(tmp_path / "plan.toml")
    assert Plan.read(tmp_path / "plan.toml").values == VALUES
    assert all(option.help in (tmp_path / "plan.toml").read_text() for option in KEYS.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_draft_tokens = ", "TOML"),
        ("k = 3", "unknown key 'k'; known: target, "),
        ("num_draft_tokens = 1.5", "invalid num_draft_tokens 1.5: expected a whole number, at least 0, or auto$"),
        ("max_len = true", "invalid max_len True: expected a whole number, at least 2$"),
    ],
)
def test_an_invalid_plan_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(OutriderError, match=says):
        Plan.read(tmp_path / "plan.toml")
    with pytest.raises(OutriderError, match="cannot read the plan"):
        Plan.read(tmp_path / "missing.toml")


def test_a_device_file_is_refused_as_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """``/dev/null`` used to count as an empty plan."""
    assert main(["serve", "/dev/null"]) == 2
    assert "/dev/null is a device: give a plan file" in capsys.readouterr().err


def test_the_command_line_overrides_the_plan(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "plan.toml").write_text(
        'target = "model"\nmethod = "suffix"\nnum_draft_tokens = 3\nmax_len = 64\nsame_text = true\n'
    )
    plan = Plan.read(tmp_path / "plan.toml")
    models, methods = filled(ModelOptions(max_len=32), plan), filled(MethodOptions(method="ngram"), plan)
    assert (models.target, models.max_len, models.same_text) == (str(tmp_path / "model"), 32, True)
    assert (methods.method, methods.num_draft_tokens) == ("ngram", 3)
    (tmp_path / "small.gguf").touch()
    assert served_name(str(tmp_path / "small.gguf")) == "small.gguf"
    assert served_name(models.target) == "model" and served_name("a/b") == "a/b" and served_name(None) == "outrider"


def test_zero_counts_as_a_given_value() -> None:
    plan = Plan({"num_draft_tokens": 4})
    assert joined(plan, ModelOptions(), MethodOptions(num_draft_tokens=0)).values == {"num_draft_tokens": 0}
    assert joined(Plan({"num_draft_tokens": 0}), ModelOptions(), MethodOptions()).values == {"num_draft_tokens": 0}
    switched_off = joined(Plan({"grammar_drafts": True}), MethodOptions(grammar_drafts=False))
    assert switched_off.values == joined(Plan({"grammar_drafts": False}), MethodOptions()).values == {"grammar_drafts": False}
    given = {"max_len": 64, "kv_memory": 2}
    assert joined(Plan(given), ModelOptions(max_len=0), LimitOptions(kv_memory=0.0)).values == {"max_len": 0, "kv_memory": 0.0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nothing.toml"], "cannot read the plan"),
        (["."], "is a folder, not a plan file: give a model's folder with --target"),
        (["--port", "0", "--max-batch", "0"], "invalid --max-batch 0"),
        (["--port", "0", "--kv-memory", "0"], "invalid --kv-memory 0"),
        (["--port", "0", "--kv-memory", "nan"], "invalid --kv-memory nan"),
        (["--max-queue", "0"], "invalid --max-queue 0: expected a whole number, at least 1"),
        (["--schema-timeout", "0"], "invalid --schema-timeout 0.0: expected a finite number, above 0"),
        (["--worker-memory", "inf"], "--worker-memory inf"),
        (["--api-keys", "none"], "cannot read the API keys"),
        (["--max-len", "0"], "invalid --max-len 0"),
    ],
)
def test_usage_errors_are_one_line_before_loading(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    assert says in capsys.readouterr().err


def test_an_occupied_port_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said.count(str(port)) == 1 and "choose another --port" in said


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_is_no_name_is_reported(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert f"cannot listen on {host} port 0" in capsys.readouterr().err


def test_chunks_are_sent_without_waiting_for_acknowledgements() -> None:
    """Clients delay acknowledgements by 40 ms, except on new connections, which made the first token 40 ms later."""
    with run.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of compiled passes."""
    return tmp_path_factory.mktemp("packages")


@pytest.mark.skipif(not native.load(), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch's own warnings during compilation
@pytest.mark.parametrize("options", [[], ["--compile", "auto"], ["--compile", "always"]])
def test_target_and_draft_are_compiled_before_the_first_client(
    target: Path, packages: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(packages))
    served: list[LLM] = []
    monkeypatch.setattr(run, "log_json", lambda: None)
    monkeypatch.setattr(run, "serve", lambda llm, *_: served.append(llm))
    drafted = ["--target", str(target), "--draft", str(target), "--method", "draft"]
    assert main(["serve", *drafted, "--port", "0", *options]) == 0
    (llm,) = served
    assert llm.runner.passes.is_compiled and llm.proposer.draft.passes.is_compiled  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("level", "events"), [(logging.WARNING, ["ready", "failed"]), (logging.DEBUG, ["step", "ready", "failed"])]
)
def test_the_log_has_only_lines_of_json(
    level: int, events: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = logging.getLogger("outrider")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    package.addHandler(logging.StreamHandler())  # that of the command line
    package.propagate = False
    package.setLevel(level)
    run.log_json()
    package.debug("step")
    package.info("ready")
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        package.exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == events and "division by zero" in lines[-1]["traceback"]


@pytest.mark.parametrize(
    ("host", "keys", "is_reported"),
    [("127.0.0.1", [], False), ("0.0.0.0", [], True), ("0.0.0.0", [("secret", Client())], False)],
)
def test_a_server_without_keys_that_others_can_reach_is_reported(
    plain: LLM, host: str, keys: Any, is_reported: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "GracefulServer", MagicMock())
    run.serve(plain, ServerConfig(), KeyRing(keys), MagicMock(getsockname=lambda: (host, 80)))
    assert ("reachable from other machines without an API key" in caplog.text) == is_reported


def test_a_process_serves_until_a_signal_and_finishes_its_streams(target: Path, plain: LLM) -> None:
    with serving_process(target) as server:
        ready = server.ready
        assert ready["event"] == "ready" and ready["model"] == target.name and ready["drafter"].startswith("drafts with ")
        body = {"prompt": "def add(", "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in [first, *lines] if line]
        assert rest.pop() == "data: [DONE]"
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest)
        assert server.process.wait(60) == 0
        server.reader.join()
    assert text == plain.generate("def add(", SamplingParams(max_tokens=150, ignore_eos=True))[0].outputs[0].text
    assert [(line["event"], line["completion_tokens"]) for line in server.log] == [("request", 150)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_examples_of_the_page_run(served: Served) -> None:
    examples = re.findall(r"^curl .*?(?=\n\n|\n```)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 4
    for example in examples:
        command = example.replace("http://127.0.0.1:8000", served.url).replace("curl ", "curl --fail-with-body -sS ", 1)
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"
        assert done.stdout


def test_documented_limits_are_the_defaults() -> None:
    page, config = (PAGE.parents[1] / "SECURITY.md").read_text(), ServerConfig()
    units = {"MiB": 1 << 20}
    promised = re.findall(r"`--([a-z-]+)`,? (\d+)(?: (MiB))?", page)
    assert len(promised) == 12
    for name, number, unit in promised:
        assert getattr(config, name.replace("-", "_")) == int(number) * units.get(unit, 1), name


def test_the_page_names_every_field_and_existing_metrics(served: Served) -> None:
    page, metrics = PAGE.read_text(), httpx.get(served.url + "/metrics").text
    bodies = CompletionBody, ChatBody, ResponseBody, MessagesBody
    fields = {name for body in bodies for name in (*body.model_fields, *body.ignored)}
    assert not [name for name in sorted(fields) if f"`{name}`" not in page]
    named = re.findall(r"`((?:vllm|outrider):\w+)`", page)
    assert len(named) > 5
    assert not [name for name in named if not re.search(rf"^{name}(_bucket)?\{{", metrics, re.MULTILINE)]


def test_the_number_of_samples_is_bounded_by_max_choices_alone() -> None:
    assert CompletionBody.model_validate({"prompt": "x", "n": 200}).n == 200


def test_wrong_fields_are_named_in_the_words_of_the_api() -> None:
    def told(**body: object) -> str:
        with pytest.raises(ValidationError) as error:
            CompletionBody.model_validate(body)
        return mistakes(error.value.errors())

    assert told(prompt="x", stream_options={}) == "stream_options needs stream: true"
    assert told(prompt="\ud800") == "prompt: invalid Unicode: unpaired surrogate; prompt: expected a valid list"
    no_object = {"type": "model_attributes_type", "loc": (), "msg": "Input should be a valid dictionary"}
    assert "a JSON object, sent with the header Content-Type" in mistakes([no_object])
