"""Load tests of a server with known delays, in virtual time: results are exact and no test waits."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from rich.console import Console

from outrider.bench.load import counters, own_server
from outrider.bench.load.arrivals import Load
from outrider.bench.load.cells import Objective, cells, worst
from outrider.bench.load.client import Client, Sample
from outrider.bench.load.counters import parse
from outrider.bench.load.report import document, table, verdict
from outrider.bench.load.sweep import Mode, Sweep, Traffic
from outrider.cli import bench_serve, main
from outrider.registry import PLAIN, SPECULATIVE
from outrider.types import OutriderError

from .virtual import FakeServer, VirtualTime, run

URL = "http://fake"
BOTH = (Mode(PLAIN, URL, {"speculative": {"num_draft_tokens": 0}}), Mode(SPECULATIVE, URL))


def swept(server: FakeServer, *loads: Load, modes: Any = BOTH, **traffic: Any) -> Sweep:
    given = {"prompts": ["one", "two", "three"], "max_tokens": 9, "repeat": 2} | traffic
    sweep = Sweep(modes, loads, Traffic(**given), transport=server.transport())
    run(sweep.run())
    return sweep


def found(sweep: Sweep, **objective: float) -> dict[str, Any]:
    """Return mode -> cell of the only load."""
    return {cell["mode"]: cell for cell in cells(sweep.groups, Objective(**objective))}


def test_latencies_and_speeds_match_the_server() -> None:
    both = found(swept(FakeServer(), Load(concurrency=1)))
    plain, speculative = both[PLAIN], both[SPECULATIVE]
    assert plain["first_token_ms"] == speculative["first_token_ms"] == {"p50": pytest.approx(250), "p95": pytest.approx(250)}
    # 9 tokens: 8 pauses of one token each, or 4 pauses of two, two, two and one
    assert plain["tok_s"] == pytest.approx(9 / (0.25 + 8 * 0.04))
    assert speculative["tok_s"] == pytest.approx(9 / (0.25 + 4 * 0.04))
    assert speculative["speedup"] == pytest.approx(0.57 / 0.41) and plain["speedup"] == 1
    assert plain["inter_token_ms"] == {"p50": pytest.approx(40), "p95": pytest.approx(40)}
    assert speculative["inter_token_ms"] == {"p50": pytest.approx(20), "p95": pytest.approx(40)}
    assert speculative["pause_ms"]["p50"] == pytest.approx(40)
    assert speculative["request_ms"]["p50"] == pytest.approx(410)
    assert speculative["first_token_p95_ratio"] == pytest.approx(1)


def test_the_number_of_clients_is_the_requested_one() -> None:
    for concurrency in (1, 3, 8):
        server = FakeServer()
        sweep = swept(server, Load(concurrency=concurrency), repeat=1)
        assert server.most == concurrency
        cell = found(sweep)[SPECULATIVE]
        assert cell["requests"] == 4 * concurrency
        assert cell["tok_s"] == pytest.approx(concurrency * 9 / 0.41)


def test_a_turn_continues_the_answer_to_the_one_before() -> None:
    server = FakeServer()
    sweep = swept(server, Load(concurrency=2), modes=BOTH[1:], turns=3, requests_per_client=1, repeat=2)
    prompts = [body["prompt"] for body in server.bodies if body["max_tokens"] == 9]
    assert len(prompts) == 2 * 2 * 3 and found(sweep)[SPECULATIVE]["requests"] == 12
    first, second, third = (prompt.splitlines() for prompt in prompts[:6:2])  # two clients in turn
    assert first[-1] == "one" and second[:-1] == [first[0], "one" + "x" * 9] and second[-1] == "two"
    assert third[:-1] == [*second[:-1], "two" + "x" * 9] and third[-1] == "three"
    assert len({prompt.splitlines()[0] for prompt in prompts}) == 4  # conversations have nothing in common


def test_a_conversation_ends_with_a_failed_turn() -> None:
    server = FakeServer(limit=1)
    cell = found(swept(server, Load(concurrency=2), modes=BOTH[1:], turns=4, requests_per_client=1, repeat=1))[SPECULATIVE]
    assert (cell["requests"], cell["failed"]) == (4 + 1, 1)


def test_connections_are_reused() -> None:
    """Most clients reuse connections, and a server may treat new ones differently (their first acknowledgements are sooner)."""
    server = FakeServer()
    swept(server, Load(concurrency=2), repeat=1)
    assert server.num_read_whole == len(server.bodies) > 0


def test_arrivals_have_the_rate_and_are_the_same_for_both_modes() -> None:
    started: dict[str, list[float]] = {}
    sweep = swept(FakeServer(), Load(rate=5.0), num_requests=400, repeat=1)
    for mode, measured in sweep.groups[0].repeats[0].items():
        times = sorted(sample.started for sample in measured.samples)
        started[mode] = [time - times[0] for time in times]
    assert started[PLAIN] == pytest.approx(started[SPECULATIVE])
    gaps = [later - earlier for earlier, later in zip(started[PLAIN], started[PLAIN][1:], strict=False)]
    assert fmean(gaps) == pytest.approx(1 / 5, rel=0.15)
    assert fmean([gap**2 for gap in gaps]) == pytest.approx(2 / 25, rel=0.4)  # exponential, not regular


def test_drafts_are_counted_from_the_metrics_page() -> None:
    server = FakeServer()
    both = found(swept(server, Load(concurrency=2), repeat=3))
    cell = both[SPECULATIVE]
    num_rounds = 3 * 8 * 5  # measured runs only, without warm-up
    assert (cell["drafts"], cell["accepted"]) == (3 * num_rounds, 3 * 8 * 4)
    assert cell["mean_acceptance_length"] == pytest.approx(9 / 5)
    assert cell["draft_acceptance_rate"] == pytest.approx(4 / 15)
    assert cell["acceptance_by_position"] == [pytest.approx(4 / 5)]
    assert cell["phase_seconds"] == {"score": pytest.approx(num_rounds / 10)}
    assert both[PLAIN]["mean_acceptance_length"] is None and both[PLAIN]["drafts"] == 0


def test_a_server_that_does_not_count_tokens_in_chunks_is_measured_too() -> None:
    server = FakeServer(counts=False, has_metrics=False, per_chunk=3)
    cell = found(swept(server, Load(concurrency=1), max_tokens=13, repeat=1))[SPECULATIVE]
    assert cell["tok_s"] == pytest.approx(13 / (0.25 + 4 * 0.04))
    assert cell["inter_token_ms"]["p50"] == pytest.approx(40 / 3)
    assert cell["mean_acceptance_length"] is None
    assert all("continuous_usage_stats" not in body["stream_options"] for body in server.bodies[2:])


@pytest.mark.parametrize("last", [[], [{"text": "", "finish_reason": "length"}]])  # of vLLM, and of llama.cpp
def test_tokens_of_uncounted_chunks_are_spread_evenly(last: list[Any]) -> None:
    events = [{"choices": [{"text": "a"}]}] * 3 + [{"choices": last, "usage": {"completion_tokens": 4}}]
    sample = answered("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
    assert sample.error is None and [count for _, count in sample.pauses] == [1.5, 1.5]  # together the three after the first


def test_events_may_lack_the_space_after_the_colon() -> None:
    sample = answered('data:{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\r\n\r\ndata:[DONE]\r\n\r\n')
    assert sample.error is None and sample.num_tokens == 1


@pytest.mark.parametrize("event", ["[]", "null", "3", "{", '{"choices": ["a"]}', '{"choices": {}}', '{"usage": "none"}'])
def test_an_event_of_another_form_fails_only_its_request(event: str) -> None:
    assert answered(f"data: {event}\n\ndata: [DONE]\n\n").error


def sample_of(handler: Callable[[httpx.Request], httpx.Response]) -> Sample:
    async def ask() -> Sample:
        async with httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(handler)) as http:
            return await Client(http, {}).ask("a")

    return asyncio.run(ask())


def answered(body: str) -> Sample:
    """Return the sample of a request whose response has this body."""
    return sample_of(lambda request: httpx.Response(200, text=body))


@pytest.mark.parametrize("num_closed", [1, 2])
def test_a_request_on_a_closed_connection_is_sent_again_once(num_closed: int) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) <= num_closed:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(
            200, text='data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
        )

    sample = sample_of(answer)
    assert len(asked) == 2 and (sample.error is None) == (num_closed == 1)


def test_goodput_counts_requests_that_meet_the_objective() -> None:
    server = FakeServer()
    sweep = swept(server, Load(concurrency=1), repeat=1)
    assert found(sweep, first_token=0.3, token=0.05)[PLAIN]["good_share"] == 1
    assert found(sweep, first_token=0.3, token=0.05)[PLAIN]["goodput_s"] == pytest.approx(1 / 0.57)
    assert found(sweep, first_token=0.2, token=0.05)[PLAIN]["good_share"] == 0
    strict = found(sweep, first_token=0.3, token=0.03)
    assert (strict[PLAIN]["good_share"], strict[SPECULATIVE]["good_share"]) == (0, 1)  # only drafts meet the objective


def test_refused_requests_count_as_failures_without_tokens() -> None:
    server = FakeServer(limit=2)
    cell = found(swept(server, Load(concurrency=4), repeat=1))[SPECULATIVE]
    assert cell["failed"] > 0 and cell["errors"] == ["429: the server is busy"]
    assert 0 < cell["requests_s"] == pytest.approx(cell["goodput_s"])  # of answered requests, which all meet the objective
    assert cell["good_share"] == 1 - cell["failed"] / cell["requests"]


def test_modes_take_turns_in_rotating_order() -> None:
    server = FakeServer()
    swept(server, Load(concurrency=1), repeat=2, requests_per_client=1)
    asked = ["plain" if "speculative" in body else "speculative" for body in server.bodies if body["max_tokens"] == 9]
    assert asked == ["plain", "speculative", "speculative", "plain"]


def test_repeats_and_loads_continue_with_the_next_prompts_for_all_modes() -> None:
    server = FakeServer()
    swept(server, Load(concurrency=2), Load(concurrency=1), requests_per_client=1)
    asked = [(body["prompt"].split("\n")[1], "speculative" in body) for body in server.bodies if body["max_tokens"] == 9]
    for is_plain in (True, False):
        assert [text for text, mode in asked if mode == is_plain] == ["one", "two", "three", "one", "two", "three"]


def test_the_warm_up_does_not_send_the_prompts_that_are_measured_next() -> None:
    server = FakeServer()
    loads = Load(concurrency=2), Load(concurrency=2)
    swept(server, *loads, requests_per_client=1, prompts=["one", "two", "three", "four"], repeat=1)
    bodies = [body for body in server.bodies if body["max_tokens"] > 1 and "speculative" in body]
    asked = [(body["max_tokens"] < 9, body["prompt"].split("\n")[1]) for body in bodies]
    pairs = [(is_warm_up, {text for _, text in group}) for is_warm_up, group in groupby(asked, lambda each: each[0])]
    first, last = {"one", "two"}, {"three", "four"}
    assert pairs == [(True, last), (False, first), (True, first), (False, last)]


def test_servers_rest_before_each_run() -> None:
    sweep = swept(FakeServer(), Load(concurrency=2), rest=7.5)
    runs = [sample for repeat in sweep.groups[0].repeats for run in repeat.values() for sample in run.samples]
    moments = sorted(moment for sample in runs for moment in (sample.started, sample.ended))
    silences = [later - earlier for earlier, later in pairwise(moments) if later - earlier > 1]
    assert silences == pytest.approx([7.5] * 3)  # between the four runs, not within one
    assert document(sweep, Objective(), {})["rest_s"] == 7.5


def test_prompts_have_unique_beginnings_except_the_shared_prefix() -> None:
    server = FakeServer()
    for _ in range(2):  # a server may be measured twice, with warm caches
        swept(server, Load(concurrency=3))
    prompts = [body["prompt"] for body in server.bodies if body["max_tokens"] > 1]  # others query the server's features
    assert len({prompt[:10] for prompt in prompts}) == len(prompts) == 2 * 2 * (3 + 2 * 12)  # sweeps, modes, repeats
    server = FakeServer()
    swept(server, Load(concurrency=3), shared_prefix="once upon a time")
    measured = [body["prompt"] for body in server.bodies if body["max_tokens"] == 9]
    assert len({prompt[:10] for prompt in measured}) == 4  # two repeats of two modes
    assert all(prompt[11:].startswith("once upon a time\n# ") for prompt in measured)
    assert len({prompt[:38] for prompt in measured}) == len(measured)  # unique after the shared prefix


def test_progress_counts_requests_and_an_interrupt_keeps_finished_runs() -> None:
    told: list[tuple[float, float, str]] = []
    sweep = Sweep(BOTH, [Load(concurrency=1), Load(concurrency=3)], Traffic(["a"], max_tokens=9, repeat=2),
                  transport=FakeServer().transport())  # fmt: skip

    def report(done: float, total: float, what: str) -> None:
        told.append((done, total, what))
        if len(told) == 10:  # two loads warm up
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(sweep.run(report))
    assert [len(group.repeats) for group in sweep.groups] == [2, 1]
    done, total, what = told[-1]
    assert done / total == 13 / 16 and "at a time" in what
    result = document(sweep, Objective(), {"interrupted": True})
    assert result["interrupted"] and len(result["cells"]) == 4


def measured(monkeypatch: pytest.MonkeyPatch, server: FakeServer, *options: str, num_runs: int | None = None) -> int:
    """Run `bench serve` on a fake server, with Ctrl-C after ``num_runs``, and return its exit code."""

    @contextmanager
    def address(*given: object) -> Iterator[str]:
        yield URL

    def measure(sweep: Sweep) -> None:
        sweep._transport = server.transport()

        begun: list[str] = []

        def report(done: float, total: float, what: str) -> None:
            begun.extend([] if "warming up" in what else [what])
            if len(begun) - 1 == num_runs:
                raise KeyboardInterrupt

        run(sweep.run(report))

    monkeypatch.setattr(bench_serve, "address", address)
    monkeypatch.setattr(bench_serve, "modes", lambda *given: BOTH)
    monkeypatch.setattr(bench_serve, "measure", measure)
    return main(["bench", "serve", "--max-tokens", "9", "--repeat", "2", *options])


def test_a_second_ctrl_c_does_not_lose_the_measurements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*given: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return document(*given)

    monkeypatch.setattr("outrider.bench.load.report.document", interrupted)
    out = tmp_path / "load.json"
    assert measured(monkeypatch, FakeServer(), "--concurrency", "1,2", "--out", str(out), num_runs=4) == 130
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(out.read_text()) and result["interrupted"] and len(result["cells"]) == 2


@pytest.mark.parametrize(("limit", "code"), [(0, 1), (2, 0)])
def test_a_load_without_an_answer_is_an_error(
    limit: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(monkeypatch, FakeServer(limit=limit), "--concurrency", "3") == code
    shown = capsys.readouterr()
    assert "error: 3 at a time, plain:" in shown.err and "of 24 requests failed: 429: " in shown.err
    assert (json.loads(shown.out)["cells"][0]["failed"] == 24) == code


def test_answers_longer_than_the_context_are_refused() -> None:
    swept(FakeServer(context=10), Load(concurrency=1))
    with pytest.raises(OutriderError, match="invalid --max-tokens 9: the context of http://fake is 9 tokens"):
        swept(FakeServer(context=9), Load(concurrency=1))


@pytest.mark.parametrize(
    "option", ["--temperature=-1", "--rest=inf", "--slo-token=nan", "--slo-first-token=inf", f"--seed={2**64}"]
)
def test_invalid_values_are_found_before_a_server_starts(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_serve, "address", lambda *given: pytest.fail("it was started"))
    name, value = option.split("=")
    assert main(["bench", "serve", option]) == 2
    assert f"error: invalid {name} {value}" in capsys.readouterr().err


def test_the_largest_seed_is_checked_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_serve, "address", lambda *given: pytest.fail("it was started"))
    assert main(["bench", "serve", f"--seed={2**64 - 2}", "--concurrency", "1", "--requests", "3"]) == 2
    said = capsys.readouterr().err
    assert f"error: invalid --seed {2**64 - 2}: 3 conversations have the seeds {2**64 - 2} to {2**64}, expected at most" in said


def test_the_document_and_the_table_name_the_worst_cell() -> None:
    sweep = swept(FakeServer(pause=0.1, per_chunk=1), Load(concurrency=1), Load(rate=2.0))
    result = document(sweep, Objective(), {})
    json.dumps(result)
    assert result["kind"] == "serve" and result["worst"] == worst(result["cells"])
    assert result["worst"]["speedup"] == pytest.approx(1, rel=0.02)
    assert "smallest speedup 1.00x" in verdict(result)
    assert table(result).row_count == 4
    only = swept(FakeServer(owner="vllm"), Load(concurrency=1), modes=(Mode("as served", URL),))
    assert "--plain-url" in verdict(document(only, Objective(), {}))


@pytest.mark.parametrize("num_failed", [0, 256])
def test_the_table_fits_80_columns(num_failed: int) -> None:
    sweep = swept(FakeServer(), Load(concurrency=64), Load(rate=0.25), Load(rate=12.5), repeat=1)
    result = document(sweep, Objective(), {})
    for cell, longest in zip(result["cells"], (99_998.0, 1_234_567.0) * 3, strict=True):
        cell["tok_s"] *= 123
        cell["first_token_ms"] = {"p50": longest, "p95": longest}
        cell["inter_token_ms"] = {"p50": 1234.0, "p95": 9876.0}
        cell["goodput_s"], cell["mean_acceptance_length"], cell["speedup"] = 123.45, 17.01, 10.25
    result["cells"][0]["failed"] = num_failed
    screen = Console(width=80, file=io.StringIO())
    screen.print(table(result))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= 80
    for figure in ("64", "0.25/s", "99998/99998", "1235s/1235s", "1234/9876", "123.45", "10.25", "17.01"):
        assert figure in shown, figure
    assert ("fail" in shown, "256" in shown) == (num_failed > 0, num_failed > 0)


def test_counters_are_summed_over_engines() -> None:
    page = 'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\nvllm:spec_decode_num_drafts_total{engine="1"} 4.0\n'
    page += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="{a}",engine="0",position="1"} 2.0\nother 5\n'
    assert parse(page) == {(counters.ROUNDS, ""): 7.0, (counters.BY_POSITION, "1"): 2.0}


def test_a_load_is_clients_or_a_rate() -> None:
    for wrong in ({}, {"concurrency": 0}, {"rate": 0.0}, {"concurrency": 1, "rate": 1.0}):
        with pytest.raises(OutriderError):
            Load(**wrong)


def test_the_virtual_clock_does_not_wait() -> None:
    loop = VirtualTime()
    before = loop.time()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() - before == 3600
    loop.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "http://fake", "--max-batch", "4"], "--max-batch"),
        (["--url", "http://fake", "--inflate", "1b"], "--inflate"),
        (["--plain-url", "http://fake"], "requires --url"),
    ],
)
def test_an_option_without_effect_is_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 2
    assert says in capsys.readouterr().err


def test_a_server_without_token_counts_is_an_error_not_speed_0() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake", "owned_by": "another"}]})
        return httpx.Response(200, text='data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')

    sweep = Sweep(BOTH[1:], [Load(concurrency=1)], Traffic(["one"], repeat=1), transport=httpx.MockTransport(answer))
    run(sweep.run())
    (cell,) = cells(sweep.groups, Objective())
    assert cell["failed"] == cell["requests"] and "include_usage" in cell["errors"][0]


@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_is_a_number_above_0(number: float) -> None:
    with pytest.raises(OutriderError, match="rate above 0"):
        Load(rate=number)


@pytest.mark.parametrize("answers", [{"data": []}, [1], {"data": [3]}])
def test_another_kind_of_server_gives_a_one_line_error(answers: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, **more: object) -> httpx.Response:
        good = {"data": [{"id": "m", "owned_by": "vllm"}]}
        return httpx.Response(200, json=answers if "plain" in url else good, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    assert [mode.name for mode in bench_serve.modes("http://a", None, {})] == ["as served"]
    with pytest.raises(OutriderError, match="http://plain does not answer as an OpenAI-compatible server"):
        bench_serve.modes("http://a", "http://plain", {})


def test_an_invalid_address_gives_a_one_line_error() -> None:
    for url in ("http://[", "localhost:8000", ""):
        with pytest.raises(OutriderError, match="does not answer as an OpenAI-compatible server"):
            bench_serve.modes(url, None, {})


def test_a_log_line_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"event": "ready", "url"')

    class Starting:
        num_polls = 0

        def poll(self) -> None:
            self.num_polls += 1
            if self.num_polls > 1:
                log.write_text('{"event": "ready", "url": "http://here"}\n')

    assert own_server._address(Starting(), log) == "http://here"  # type: ignore[arg-type]


def test_an_own_server_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.server.config import KEYS_VARIABLE

    seen: dict[str, str] = {}

    class Ended:
        returncode = 1

        def __init__(self, words: list[str], env: dict[str, str], **more: object) -> None:
            seen.update(env)

        def poll(self) -> int:
            return 1

        def send_signal(self, sig: int) -> None: ...

        def wait(self, seconds: float | None = None) -> int:
            return 1

    monkeypatch.setenv(KEYS_VARIABLE, "secret")
    monkeypatch.setattr(own_server.subprocess, "Popen", Ended)
    with pytest.raises(OutriderError, match="did not start"), own_server.own_server([]):
        pass
    assert seen and KEYS_VARIABLE not in seen


def test_the_prompts_of_a_file_are_limited_and_mixed_by_workload(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": f"{name}{at}", "workload": name} for name in ("a", "b") for at in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    traffic = bench_serve.read_traffic(bench_serve.LoadOptions(prompts=file, num_prompts=2))
    assert traffic.prompts == ["a0", "b0", "a1", "b1"]


def test_the_document_hides_the_password_of_a_url() -> None:
    sweep = Sweep([Mode(PLAIN, "http://bob:secret@host:8000")], [], Traffic(["a"]))
    assert document(sweep, Objective(), {})["modes"][0]["url"] == "http://hidden@host:8000"
