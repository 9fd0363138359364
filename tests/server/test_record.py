"""``outrider serve --record``: recorded requests are valid traffic for ``outrider tune``, and private."""

from __future__ import annotations

import io
import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, OutriderError, SamplingParams
from outrider.search.traffic import read_file
from outrider.server.app import create_app
from outrider.server.completions import CompletionBody
from outrider.server.config import KeyRing, ServerConfig
from outrider.server.protocol import ChatBody
from outrider.server.record import Record

from .served import serving

NOW = {"type": "function", "function": {"name": "now"}}


def test_recorded_requests_are_valid_traffic(load: Callable[..., LLM], tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"prompt": "from an earlier day"}) + "\n")
    llm = load()
    with serving(llm, record=file, name="mine") as server:
        server.text("one", temperature=0.3, seed=7)
        server.text(["two", "naïve"], metadata={"note": "\ud800"})
        assert llm.tokenizer is not None
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
        server.text(llm.tokenizer.encode("four"), response_format=form)
        messages = [{"role": "user", "content": "five"}]
        assert server.post("/v1/chat/completions", messages=messages, max_tokens=4, model=None).status_code == 200
        assert server.post("/v1/responses", input="six", instructions="Be brief.", max_output_tokens=4).status_code == 200
        assert server.post("/v1/completions", prompt="refused", temperature=-1).status_code == 400
    asked = read_file(file, 9, SamplingParams(max_tokens=20, temperature=0.9))
    texts = [each.prompt.text or each.prompt.messages[0]["content"] for each in asked]
    assert texts == ["from an earlier day", "one", "two", "naïve", "four", "five", "Be brief."]
    assert [each.params.temperature for each in asked] == [0.9, 0.3, 0, 0, 0, 0, 0]  # unset: greedy, as it was served
    assert asked[1].params.seed == 7 and [each.params.max_tokens for each in asked[5:]] == [4, 4]
    assert [json.loads(line).get("response_format") for line in file.read_text().splitlines()][4]["json_schema"]["schema"]
    assert {json.loads(line).get("model") for line in file.read_text().splitlines()[1:]} == {"mine"}


def test_only_the_owner_can_read_recorded_requests(load: Callable[..., LLM], tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.touch(mode=0o644)  # of an earlier version, say
    with serving(load(), record=file) as server:
        server.text("secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_is_no_file_for_prompts(plain: LLM, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").symlink_to(tmp_path / "of a stranger")
    with pytest.raises(
        OutriderError, match=r"cannot write --record .*asked\.jsonl: it is a symbolic link, .*: name its target"
    ):
        create_app(plain, ServerConfig(record=tmp_path / "asked.jsonl"), KeyRing())
    assert not (tmp_path / "of a stranger").exists()


def test_a_descriptor_may_receive_the_requests(tmp_path: Path) -> None:
    with open(tmp_path / "asked.jsonl", "w") as file:
        Record(Path(f"/dev/fd/{file.fileno()}"), "m", None).close()


def test_a_slow_disk_does_not_delay_the_thread_that_records(tmp_path: Path) -> None:
    is_fast = threading.Event()

    class SlowFile(io.StringIO):
        def flush(self) -> None:
            assert is_fast.wait(60)

    record, written = Record(tmp_path / "asked.jsonl", "mine", None), SlowFile()
    record._file.close()
    record._file = written
    for prompt in ("one", "two"):
        record.add(CompletionBody(prompt=prompt))  # returns although the disk does not answer
    is_fast.set()
    record._writer.shutdown()
    assert [json.loads(line)["prompt"] for line in written.getvalue().splitlines()] == ["one", "two"]


def test_a_request_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    record = Record(tmp_path / "asked.jsonl", "mine", None)
    user = {"role": "user", "content": "hi"}
    forced = {"tools": [NOW], "tool_choice": NOW}  # so the schema is not used
    for value in (deep, "\ud83d", "fine"):
        form = {"type": "json_schema", "json_schema": {"schema": {"const": value}}}
        record.add(ChatBody.model_validate({"messages": [user], "response_format": form, **forced}))
    record.close()
    assert len((tmp_path / "asked.jsonl").read_text().splitlines()) == 1
    assert caplog.text.count("a request was not recorded") == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
def test_a_full_disk_does_not_disturb_the_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    record = Record(Path("/dev/full"), "mine", None)
    record.add(CompletionBody(prompt="one"))
    record.close()
    assert len(caplog.records) == 2 and "No space left" in caplog.text


def test_an_unwritable_record_is_reported_at_start(plain: LLM, tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="cannot write"):
        create_app(plain, ServerConfig(record=tmp_path / "nowhere" / "asked.jsonl"), KeyRing())
