"""Output of the commands, run in this process on a tiny random model."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import is_offline_mode
from tiny_folder import make_folder

from outrider import LLM, family
from outrider.cli import app, bench_serve, chat, console, session
from outrider.cli.app import Terminated
from outrider.cli.options import MethodOptions, ModelOptions
from outrider.engine.engine import Engine
from outrider.engine.outputs import Chunk
from outrider.engine.plan import Plan
from outrider.engine.stats import GenerationStats
from outrider.types import OutriderError, PhaseTimes

Run = Callable[..., "tuple[int, str, str]"]
PROMPT = "def add("


def models(target: Path, draft: Path) -> list[object]:
    return ["--target", target, "--draft", draft, "--compile", "never"]


def plain_text(outrider: Run, target: Path, *options: object) -> str:
    code, out, err = outrider("generate", "--target", target, "--method", "plain", "--compile", "never", *options, PROMPT)
    assert code == 0, err
    return out


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int, signalled: type[KeyboardInterrupt] = KeyboardInterrupt) -> None:
    """Raise Ctrl-C in the engine's ``number``-th step."""
    step, calls = Engine.step, []

    def interrupted(self: Engine) -> object:
        calls.append(1)
        if len(calls) == number:
            raise signalled
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)


def test_every_command_has_examples_in_its_help(outrider: Run) -> None:
    for command in app.COMMANDS:
        code, out, _ = outrider(command, "--help")
        assert code == 0 and "Examples:" in out and f"outrider {command}" in out


@pytest.mark.parametrize("k", ["0", "1", "3", "auto"])
def test_generate_matches_plain_decoding(outrider: Run, target: Path, draft: Path, k: str) -> None:
    code, out, err = outrider("generate", *models(target, draft), "-k", k, "--max-tokens", 30, PROMPT)
    assert code == 0
    assert out == plain_text(outrider, target, "--max-tokens", 30) and len(out) > 10
    assert "30 tokens" in err and "tok/s" in err and "time: draft" in err


def test_a_first_method_with_a_model_is_refused_before_anything_is_loaded(outrider: Run, target: Path, draft: Path) -> None:
    code, _, err = outrider("generate", *models(target, draft), "--method", "draft+suffix", PROMPT)
    assert (
        code == 2 and "invalid order of methods 'draft+suffix': the first must draft without a model; write suffix+draft" in err
    )
    assert "loading" not in err


def test_generate_follows_a_json_schema(outrider: Run, target: Path, tmp_path: Path) -> None:
    schema = tmp_path / "form.json"
    schema.write_text(json.dumps({"type": "array", "items": {"enum": ["weather", "climate"]}, "minItems": 1, "maxItems": 2}))
    texts = []
    for flags in ([], ["--no-grammar-drafts"]):
        options = ["--target", target, "--method", "plain", "--compile", "never", "--json-schema", schema, *flags, "--show"]
        code, out, err = outrider("generate", *options, "x")
        assert code == 0 and ("drafted by the grammar" in err) == (not flags)
        assert ("\x1b[35m" in out) == (not flags)
        texts.append(re.sub(r"\x1b\[[0-9;]*m", "", out))
    assert texts[0] == texts[1] and set(json.loads(texts[0])) <= {"weather", "climate"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "expected an object, got a list"), ("{", "cannot read the JSON schema"), (None, "No such file")],
)
def test_a_file_without_a_schema_is_named(outrider: Run, target: Path, tmp_path: Path, text: str | None, message: str) -> None:
    schema = tmp_path / "form.json"
    if text is not None:
        schema.write_text(text)
    code, _, err = outrider("generate", "--target", target, "--json-schema", schema, "x")
    assert code == 2 and message in err and "form.json" in err and err.count("\n") == 1


def test_the_shares_in_the_summary_add_up() -> None:
    text = console.summary(GenerationStats(num_tokens=9, times=PhaseTimes(1.0, 1.0, 0.0, 1.0, prefill=1.0)), 4.0).plain
    assert "prefill 1.00 s (25%)" in text and sum(map(int, re.findall(r"\((\d+)%\)", text))) == 100


def test_uncompiled_passes_are_reported(outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runner.compiled.load", lambda module, build: None)  # no compiled library is available
    monkeypatch.setattr("outrider.runner.passes.is_packed", lambda model: True)
    command = ["generate", "--target", target, "--method", "ngram", "--max-tokens", 4, "hello"]
    assert "--compile always" in outrider(*command)[2]
    assert "--compile always" not in outrider(*command, "--compile", "never")[2]


def test_the_summary_shows_acceptance_and_plain_speed(outrider: Run, target: Path, draft: Path) -> None:
    _, _, err = outrider("generate", *models(target, draft), "-k", 4, "--max-tokens", 31, PROMPT)
    assert "plain decoding: about" in err
    assert "100% of the drafts" in err


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_generate_reads_a_piped_prompt(outrider: Run, target: Path, arguments: list[str]) -> None:
    options = ["--target", target, "--method", "plain", "--compile", "never", "--max-tokens", 9]
    code, out, _ = outrider("generate", *options, *arguments, stdin=PROMPT)
    assert code == 0 and out == plain_text(outrider, target, "--max-tokens", 9)


def test_generate_json_is_one_document(outrider: Run, target: Path, draft: Path) -> None:
    _, out, _ = outrider("generate", *models(target, draft), "-k", 3, "--max-tokens", 20, "--json", PROMPT)
    document = json.loads(out)
    assert document["text"] + "\n" == plain_text(outrider, target, "--max-tokens", 20)
    assert len(document["token_ids"]) == len(document["origins"]) == document["stats"]["num_tokens"] == 20
    assert set(document["origins"]) <= {"accepted", "corrected", "bonus", "plain"}
    assert document["finish_reason"] == "length"
    assert document["stats"]["mean_acceptance_length"] > 3
    assert set(document["stats"]["ms"]) == {"draft", "score", "verify", "host"}
    assert set(document["stats"]["seconds"]) == {*document["stats"]["ms"], "prefill", "draft_prefill"}
    assert document["stats"]["plain_tok_s"] > 0 and document["stats"]["expected_speedup"] > 0


def test_generate_reports_the_drafter_that_it_found_in_one_line(outrider: Run, tmp_path: Path) -> None:
    target = make_folder(tmp_path / "target", hidden_size=32, intermediate_size=48, num_hidden_layers=12)
    command = ["generate", "--target", target, "--compile", "never", "--max-tokens", 9, "-k", 2, "hello"]
    nothing = "drafts with suffix, because no drafter was found for the target"
    assert outrider(*command)[2].splitlines().count(nothing) == 1
    make_folder(tmp_path / "draft", seed=1)
    code, out, err = outrider(*command)
    said = f"drafts with draft model {tmp_path / 'draft'} (found next to the target)"
    assert code == 0 and err.splitlines().count(said) == 1 and nothing not in err
    assert out == outrider(*command, "--method", "plain")[1]
    assert "drafts with" not in outrider(*command, "--method", "ngram")[2]
    assert json.loads(outrider(*command, "--json")[1])["drafter"] == said
    code, out, _ = outrider(
        "bench", *command[1:5], "--workloads", "math", "--num-prompts", 1, "--max-tokens", 4, "--repeat", 1, "-k", 2
    )
    methods = {cell["method"] for cell in json.loads(out.strip().splitlines()[-1])["cells"]}
    assert code == 0 and methods == {"plain", "suffix", f"draft:draft={tmp_path / 'draft'}"}


def test_generate_obeys_stop_and_seed(outrider: Run, target: Path) -> None:
    full = plain_text(outrider, target, "--max-tokens", 30)
    stop = full[5:8]
    assert plain_text(outrider, target, "--max-tokens", 30, "--stop", stop) == full[: full.find(stop)] + "\n"
    sampled = ["--max-tokens", 30, "--temperature", 1, "--seed"]
    assert plain_text(outrider, target, *sampled, 1) == plain_text(outrider, target, *sampled, 1)
    assert plain_text(outrider, target, *sampled, 1) != plain_text(outrider, target, *sampled, 2)


def test_debug_shows_the_traceback_of_a_failed_proposer(outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr("outrider.proposers.ngram.NgramProposer.propose", fail)
    command = ["generate", "--target", target, "--method", "ngram", "--compile", "never", "--max-tokens", 4, PROMPT]
    code, out, err = outrider(*command)
    assert code == 0 and "(use --debug for details)" in err and "Traceback" not in err
    code, same, err = outrider(*command, "--debug")
    assert code == 0 and same == out and "Traceback" in err and "ZeroDivisionError: odd" in err


def test_show_colours_the_same_text(outrider: Run, target: Path, draft: Path) -> None:
    _, out, err = outrider("generate", *models(target, draft), "-k", 3, "--max-tokens", 30, "--show", PROMPT)
    assert "\x1b[32m" in out  # green: accepted
    without = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert without == plain_text(outrider, target, "--max-tokens", 30)
    assert "accepted draft" in err and "bonus" in err


def test_the_painter_keeps_the_text_of_chunks() -> None:
    """Text can be emitted later than its tokens (incomplete characters, possible stop strings); colours follow the tokens."""

    class Letters:
        def feed(self, token_ids: list[int]) -> str:
            return "".join("abcdef"[token] * 2 for token in token_ids)

        def flush(self) -> str:
            return ""

    painter = console.TokenPainter(Letters())

    def chunk(text: str, token_ids: list[int], origins: list[str]) -> Chunk:
        return Chunk("r", token_ids, origins, text)

    first = painter.paint(chunk("aab", [0, 1], ["accepted", "corrected"]))
    second = painter.paint(chunk("bcc", [2], ["bonus"]))
    green, yellow, cyan = (f"\x1b[{code}m" for code in ("32", "1;33", "36"))
    assert first == f"{green}aa\x1b[0m{yellow}b\x1b[0m"
    assert second == f"{yellow}b\x1b[0m{cyan}cc\x1b[0m"


def test_chat_answers_a_piped_question(outrider: Run, target: Path, draft: Path) -> None:
    greedy = ["--max-tokens", 12, "--temperature", 0]
    code, out, _ = outrider("chat", *models(target, draft), *greedy, stdin="What is a ship?")
    templated = outrider("generate", *models(target, draft), *greedy, "<|user|>What is a ship?\n<|assistant|>")
    assert code == 0 and out == templated[1]


def test_chat_samples_unless_a_temperature_is_given(outrider: Run, target: Path) -> None:
    options = ["--target", target, "--method", "plain", "--compile", "never"]
    options += ["--max-tokens", 30, "--seed", 4, "--ignore-eos"]
    said = outrider("chat", *options, "What is a ship?")[1]
    readable = ["--temperature", 0.7, "--top-p", 0.9]
    assert said == outrider("chat", *options, *readable, "What is a ship?")[1]
    assert said != outrider("chat", *options, "--temperature", 0, "What is a ship?")[1]


def test_a_conversation_longer_than_the_context_drops_its_oldest_turns(target: Path) -> None:
    from outrider import LLM

    llm = LLM(target, method="plain", compile="never", max_len=120)
    turns = [{"role": role, "content": f"{role} {at} " * 3} for at in range(6) for role in ("user", "assistant")]
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "And now?"}
    history = [system, *turns, question]
    prompt = chat._fitting_prompt(llm, history, 40)
    assert len(prompt) <= 80 and prompt == llm.chat_prompt(history)
    assert history[0] == system and history[-1] == question and len(history) < 14
    assert [turn["role"] for turn in history[1:]] == ["user", "assistant"] * ((len(history) - 2) // 2) + ["user"]
    alone = [{"role": "user", "content": "long " * 300}]
    assert len(chat._fitting_prompt(llm, alone, 40)) > 120 and len(alone) == 1


def test_chat_keeps_the_conversation(outrider: Run, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two", "/help", "/new", "one", ""])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen: list[tuple[int, bool]] = []
    answer = chat._answer

    def spy(llm: LLM, history: list[dict[str, str]], *rest: object) -> None:
        before = llm.runner.cache.num_reused
        answer(llm, history, *rest)  # type: ignore[arg-type]
        seen.append((len(history), llm.runner.cache.num_reused > before))

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(chat, "_answer", spy)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert app.main(["chat", *map(str, models(target, draft)), "--max-tokens", "5"]) == 0
    assert seen == [(2, False), (4, True), (2, True)]  # messages, and whether a part of the prompt was cached


def test_a_question_that_exceeds_the_context_does_not_erase_the_conversation(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, lengths = iter(["one", "long " * 600, "two", "/exit"]), []
    answer = chat._answer

    def spy(llm: LLM, history: list[dict[str, str]], *rest: object) -> object:
        lengths.append(len(history))
        return answer(llm, history, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(chat, "_is_interactive", lambda message: True)
    monkeypatch.setattr(chat, "_answer", spy)
    code, _, err = outrider("chat", "--target", target, "--method", "plain", "--compile", "never", "--max-tokens", 5)
    assert code == 0 and err.count("error:") == 1 and lengths == [0, 2, 2]  # messages before each question


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-len", "2147483647"], "--max-len 2147483647 is reduced to 512"),
        (["-k", "1000000", "--method", "ngram"], "--num-draft-tokens 1000000 is reduced to 64, the maximum of ngram"),
        (["-k", "64", "--method", "ngram", "--max-len", "512"], None),
        (["-k", "5", "--method", "plain"], None),
    ],
)
def test_too_large_numbers_are_not_truncated_silently(
    outrider: Run, target: Path, options: list[str], said: str | None
) -> None:
    code, _, err = outrider("generate", "--target", target, "--compile", "never", "--max-tokens", 2, *options, PROMPT)
    assert code == 0
    if said is None:
        assert "is reduced to" not in err
    else:
        assert said in " ".join(err.split())


def test_a_text_that_ends_with_the_context_says_so(outrider: Run, target: Path) -> None:
    run = ["generate", "--target", target, "--method", "plain", "--compile", "never", "--ignore-eos", PROMPT]
    code, out, err = outrider(*run, "--max-len", 20, "--max-tokens", 50)
    assert code == 0 and out and "the context of 20 tokens is full: --max-len sets it" in err
    assert "is full" not in outrider(*run, "--max-len", 20, "--max-tokens", 3)[2]


def test_ctrl_c_keeps_the_text_so_far_and_its_summary(
    outrider: Run, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 3)
    code, out, err = outrider("generate", *models(target, draft), "-k", 2, "--max-tokens", 60, PROMPT)
    assert code == app.EXIT_INTERRUPTED and "stopped" in err and "tok/s" in err and err.strip().endswith("interrupted")
    monkeypatch.undo()
    full = plain_text(outrider, target, "--max-tokens", 60)
    assert 0 < len(out.strip()) < len(full) and full.startswith(out.rstrip("\n"))


def test_ctrl_c_ends_a_chat_of_one_message(outrider: Run, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, 3)
    code, out, err = outrider("chat", *models(target, draft), "-k", 2, "--max-tokens", 60, "--ignore-eos", PROMPT)
    assert code == app.EXIT_INTERRUPTED and len(out) > 1 and err.strip().endswith("interrupted")


def raising(error: type[BaseException]) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(("signalled", "code"), [(KeyboardInterrupt, 0), (Terminated, 130)])
@pytest.mark.parametrize("where", ["question", "answer", "summary"])
def test_ctrl_c_ends_an_answer_of_a_chat_and_sigterm_the_chat(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch, signalled: type[KeyboardInterrupt], code: int, where: str
) -> None:
    lines: list[object] = ["hello", signalled, "/exit"] if where == "question" else ["hello", "/exit"]

    def ask(_: str) -> str:
        line = lines.pop(0)
        if line is signalled:
            raise signalled
        return str(line)

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("outrider.cli.chat._is_interactive", lambda message: True)
    if where == "answer":
        interrupt(monkeypatch, 3, signalled)
    elif where == "summary":
        monkeypatch.setattr("outrider.cli.generate.summary", raising(signalled))
    command = ["chat", "--target", target, "--method", "plain", "--compile", "never", "--max-tokens", 9, "--ignore-eos"]
    assert outrider(*command).code == code
    assert lines == ([] if code == 0 else ["/exit"])


def test_an_answer_that_ctrl_c_meets_in_its_summary_stays_in_the_conversation(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["hello", "more", "/exit"]
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    monkeypatch.setattr("outrider.cli.chat._is_interactive", lambda message: True)
    monkeypatch.setattr("outrider.cli.generate.summary", raising(KeyboardInterrupt))
    turns, answers = list[list[dict[str, str]]](), list[str]()
    fitting, stream = chat._fitting_prompt, chat.stream_to_screen

    def seen(llm: LLM, history: list[dict[str, str]], max_tokens: int) -> list[int]:
        turns.append(list(history))
        return fitting(llm, history, max_tokens)

    def answered(*given: object) -> tuple[str, KeyboardInterrupt | None]:
        answer = stream(*given)  # type: ignore[arg-type]
        answers.append(answer[0])
        return answer

    monkeypatch.setattr(chat, "_fitting_prompt", seen)
    monkeypatch.setattr(chat, "stream_to_screen", answered)
    command = ["chat", "--target", target, "--method", "plain", "--compile", "never", "--max-tokens", 9, "--ignore-eos"]
    code, out, _ = outrider(*command)
    assert code == 0 and len(answers) == 2 and answers[0] and answers[0] in out
    assert [turn["content"] for turn in turns[1]] == ["hello", answers[0], "more"]


def test_ctrl_c_keeps_the_json_document_complete(
    outrider: Run, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 4)
    code, out, err = outrider("generate", *models(target, draft), "-k", 2, "--max-tokens", 60, "--json", PROMPT)
    found = json.loads(out)
    assert code == app.EXIT_INTERRUPTED == 130 and err.strip().endswith("interrupted")
    assert found["finish_reason"] == "abort" and 0 < len(found["token_ids"]) < 60
    monkeypatch.undo()
    assert plain_text(outrider, target, "--max-tokens", 60).startswith(found["text"])


def test_ctrl_c_before_the_first_round_prints_no_json_document(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be an internal error: list index out of range."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.engine.llm.LLM._compile_for", interrupted)
    code, out, err = outrider("generate", "--target", target, "--method", "ngram", "--json", PROMPT)
    assert (code, out) == (app.EXIT_INTERRUPTED, "") and err.strip().endswith("interrupted")


def test_arguments_after_two_dashes_are_for_the_other_engine(outrider: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.cli import serve

    seen: list[list[str]] = []

    def elsewhere(plan: object, passed: list[str], *rest: object) -> None:
        seen.append(passed)

    monkeypatch.setattr(serve, "serve_elsewhere", elsewhere)
    outrider("serve", "--debug", "--engine", "vllm", "--", "--debug", "--seed", "3")
    assert seen == [["--debug", "--seed", "3"]]


def test_compare_shows_both_outputs_and_that_they_are_equal(outrider: Run, target: Path, draft: Path) -> None:
    options = [*models(target, draft), "-k", 3, "--max-tokens", 24, "--temperature", 0]
    code, out, err = outrider("compare", *options, PROMPT)
    assert code == 0
    text = PROMPT + plain_text(outrider, target, "--max-tokens", 24)
    assert out == text + text
    assert "Same text: yes, all 24 tokens are equal." in err
    assert "plain" in err and "draft k=3" in err and "100%" in err


def test_compare_names_the_drafts_that_the_method_makes(outrider: Run, target: Path) -> None:
    options = ["--target", target, "--compile", "never", "--method", "ngram", "-k", 100, "--max-tokens", 4]
    code, _, err = outrider("compare", *options, PROMPT)
    assert code == 0 and "ngram k=64" in err and "k=100" not in err


def test_compare_samples_equal_outputs_unless_a_temperature_is_given(outrider: Run, target: Path, draft: Path) -> None:
    code, out, err = outrider("compare", *models(target, draft), "-k", 3, "--max-tokens", 24, "--ignore-eos", PROMPT)
    coupled = ["--same-text", "--temperature", 0.7, "--top-p", 0.9, "--seed", 0, "--ignore-eos", "--max-tokens", 24]
    text = PROMPT + plain_text(outrider, target, *coupled)
    assert code == 0 and out == text + text
    assert "Same text: yes, all 24 sampled tokens are equal." in err
    assert "\x1b" not in out + err
    _, _, err = outrider("compare", *models(target, draft), "-k", 3, "--max-tokens", 24, "--temperature", 2, PROMPT)
    assert "as expected" in err or "yes, all" in err


def test_compare_stops_where_generate_does(outrider: Run, target: Path, draft: Path) -> None:
    stop = plain_text(outrider, target, "--max-tokens", 30)[5:8]
    options = ["--max-tokens", 30, "--temperature", 0, "--stop", stop]
    code, out, _ = outrider("compare", *models(target, draft), "-k", 3, *options, PROMPT)
    assert code == 0 and out == 2 * (PROMPT + plain_text(outrider, target, *options))


def test_ctrl_c_ends_a_race(outrider: Run, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, 60)  # after the warm-up
    code, _, err = outrider("compare", *models(target, draft), "-k", 2, "--max-tokens", 200, "--ignore-eos", PROMPT)
    assert code == app.EXIT_INTERRUPTED and "interrupted" in err


def test_a_difference_is_located_and_explained() -> None:
    from outrider.cli.compare import verdict

    def said(plain: list[int], other: list[int], greedy: bool, lossless: bool = True, **llm: bool) -> str:
        runner = SimpleNamespace(is_row_invariant=llm.get("exact", True))
        speculation, tokenizer = SimpleNamespace(same_text=llm.get("same_text", False)), SimpleNamespace(decode=str)
        given: Any = SimpleNamespace(runner=runner, speculation=speculation, tokenizer=tokenizer)
        return verdict(given, plain, other, greedy, lossless)

    assert "yes, all 2 tokens" in said([1, 2], [1, 2], True) and "2 sampled" in said([1, 2], [1, 2], False)
    assert "The first 1 tokens are equal, then plain has '[2]' and speculative '[3]'." in said([1, 2, 3], [1, 3, 3], True)
    assert "both are samples" in said([1, 2], [1, 3], False)
    for greedy in (False, True):
        assert "the verifier is lossy" in said([1, 2], [1, 3], greedy, lossless=False)
        assert "speculative the end. This should not happen: please report it." in said([1, 2], [1], greedy, same_text=True)
        assert "round differently here" in said([1, 2], [1], greedy, same_text=True, exact=False)


def test_brackets_in_a_races_titles_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from outrider.cli.compare import table

    lane: Any = SimpleNamespace(name="plain", output=[1], first_seconds=0.1, stats=GenerationStats())
    console.err.print(table([lane], {"plain": "draft:draft=./my[/model] k=3"}))
    assert "./my[/model]" in capsys.readouterr().err


def test_a_slower_race_is_explained_by_its_numbers() -> None:
    from outrider.cli.compare import why_slower

    plain = GenerationStats(num_tokens=20, num_steps=20, acceptance_histogram={0: 20})
    slow = GenerationStats(num_tokens=20, num_steps=10, acceptance_histogram={1: 10})
    plain.times.score, slow.times.score, slow.times.draft = 0.04, 0.04, 0.02
    assert plain.tok_s > slow.tok_s
    why = "a round takes 6.0 ms for 2.00 tokens, a plain one 2.0 ms for one"
    assert f"{why}. -k auto drafts only where that pays." in str(why_slower(plain, slow, is_auto=False))
    assert f"{why}. outrider doctor checks whether the draft fits." in str(why_slower(plain, slow, is_auto=True))
    assert why_slower(slow, plain, is_auto=True) is None


def test_bench_prints_a_table_and_one_json_line(outrider: Run, target: Path, draft: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "def f("}\n{"turns": ["Why?", "And?"]}\n{"question": "What?", "workload": "quiz"}\n' * 2)
    out_file, page = tmp_path / "results" / "x.json", tmp_path / "results" / "x.html"
    code, out, err = outrider(
        "bench", *models(target, draft), "--method", "draft,ngram", "-k", "2,auto", "--temperature", "0,0.8",
        "--batch", "1,2", "--prompts", prompts, "--max-tokens", 6, "--repeat", 2, "--out", out_file, "--html", page,
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert len(out.splitlines()) == 1 and result == json.loads(out_file.read_text())
    for name in ("version", "commit", "device", "dtype", "threads", "target", "command", "date", "versions"):
        assert name in result
    assert (result["seed"], result["verifier"]) == (0, "block") and set(result["prompt_digests"]) == {"mine", "quiz"}
    cells = result["cells"]
    assert len(cells) == 5 * 2 * 2 * 2  # (plain + 4) x temperatures x batches x workloads
    assert {cell["workload"] for cell in cells} == {"mine", "quiz"}
    for cell in cells:
        assert {
            "method", "k", "temperature", "batch", "workload", "tok_s", "plain_tok_s", "speedup", "mean_acceptance_length",
            "acceptance_rate", "acceptance_histogram", "same_text", "ms", "speedup_interval", "acceptance_by_position",
            "cost_ratio", "expected_speedup", "difference", "inter_token_ms", "time_to_first_token_ms",
            "predicted_plain_tok_s", "prediction_error_percent", "loop_share", "tokens_before_loops",
            "before_loops", "busy",
        } <= set(cell)  # fmt: skip
        assert set(cell["ms"]) == {"draft", "score", "verify", "host"}
        assert cell["same_text"] == (1.0 if cell["temperature"] == 0 else None)
        assert cell["tokens"] == 6 * cell["prompts"] and cell["faults"] == 0 and cell["repeats"] == 2
        assert cell["tok_s"] > 0 and cell["plain_tok_s"] > 0
    drafted = [cell for cell in cells if cell["method"] == "draft" and cell["k"] == 2 and cell["temperature"] == 0]
    assert all(cell["acceptance_rate"] == 1.0 for cell in drafted)
    for cell in cells:
        assert cell["predicted_plain_tok_s"] > 0
        if cell["difference"] is not None:
            assert sum(cell["difference"].values()) == pytest.approx(
                cell["decode_speedup"] - cell["expected_speedup"], abs=0.05
            )
    assert "speedup" in err and "warming up" in err and "formula" in err
    assert page.read_text().count("<figure>") == 2 * 6  # two temperatures


def test_bench_measures_a_k_above_the_methods_maximum_once(outrider: Run, target: Path) -> None:
    code, out, err = outrider(
        "bench", "--target", target, "--compile", "never", "--method", "ngram", "-k", "64,100", "--workloads", "math",
        "--num-prompts", 1, "--max-tokens", 4, "--repeat", 1,
    )  # fmt: skip
    assert code == 0 and "ngram k=100 is reduced to k=64, the maximum of the method" in err
    assert [(cell["method"], cell["k"]) for cell in json.loads(out)["cells"]] == [("plain", 0), ("ngram", 64)]


def test_bench_keeps_finished_measurements_when_interrupted(
    outrider: Run, target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.bench import grid, html

    generate, calls = grid.generate, []

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return generate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(grid, "generate", interrupted)
    page = html.page
    monkeypatch.setattr(html, "page", lambda result: [os.kill(os.getpid(), signal.SIGINT), page(result)][1])  # a second Ctrl-C
    out_file = tmp_path / "x.json"
    code, out, err = outrider(
        "bench", *models(target, draft), "--method", "ngram", "-k", 2, "--workloads", "math,story", "--num-prompts", 1,
        "--max-tokens", 4, "--repeat", 3, "--out", out_file, "--html", tmp_path / "x.html",
    )  # fmt: skip
    assert code == app.EXIT_INTERRUPTED and "interrupted" in err and (tmp_path / "x.html").exists()
    result = json.loads(out_file.read_text())
    assert result["interrupted"] is True and result == json.loads(out)
    assert [(cell["workload"], cell["repeats"]) for cell in result["cells"]] == [("math", 2), ("math", 2)]


def test_bench_keeps_finished_measurements_when_the_target_fails(
    outrider: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.bench import grid
    from outrider.types import OutriderError

    generate, calls = grid.generate, []

    def failing(last: int) -> Callable[..., object]:
        def run(*args: object) -> object:
            calls.append(args)
            if len(calls) > last:
                raise OutriderError("the target failed")
            return generate(*args)  # type: ignore[arg-type]

        return run

    out_file = tmp_path / "x.json"
    command = [
        "bench", "--target", target, "--compile", "never", "--method", "ngram", "-k", 2, "--workloads", "math,story",
        "--num-prompts", 1, "--max-tokens", 4, "--repeat", 2, "--out", out_file,
    ]  # fmt: skip
    monkeypatch.setattr(grid, "generate", failing(5))  # two for warm-up, two of the first repeat, one of the second
    code, out, err = outrider(*command)
    assert code == app.EXIT_INTERNAL and err.splitlines()[-1] == "error: the target failed"
    assert {cell["repeats"] for cell in json.loads(out)["cells"]} == {1}
    calls.clear()
    monkeypatch.setattr(grid, "generate", failing(7))  # two for warm-up, four measured of one workload, one of the next
    code, out, err = outrider(*command)
    assert code == app.EXIT_INTERNAL
    kept = json.loads(out)
    assert kept == json.loads(out_file.read_text()) and {cell["workload"] for cell in kept["cells"]} == {"math"}
    calls.clear()
    monkeypatch.setattr(grid, "generate", failing(0))
    code, out, _ = outrider(*command)
    assert code == app.EXIT_INTERNAL and not out and json.loads(out_file.read_text()) == kept  # earlier results are kept


@pytest.fixture
def inflatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large model of an inflated target is a small one."""
    from outrider.bench.shapes import Shape

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    # the source has hidden size 16 and 2 layers
    monkeypatch.setattr(
        "outrider.bench.inflate.shape_for", lambda config, params: Shape(hidden=256, layers=5, heads=16, kv_heads=4, ffn=256)
    )


def test_compare_inflates(outrider: Run, target: Path, draft: Path, inflatable: None) -> None:
    options = ["-k", 3, "--max-tokens", 24, "--temperature", 0, PROMPT]
    code, out, err = outrider("compare", *models(target, draft), "--max-len", 500, "--inflate", "1b", *options)
    assert code == 0 and "padded to the cost of a 1B model" in err
    assert "writing the inflated model" in err and out == outrider("compare", *models(target, draft), *options)[1]


def test_a_method_is_checked_with_the_inflated_drafts(target: Path, draft: Path) -> None:
    given = ModelOptions(target=str(target)), MethodOptions(method="draft")
    with pytest.raises(OutriderError, match="give draft:draft="):
        session.resolve(*given)
    assert session.resolve(*given, {"draft": draft})["drafts"] == {"draft": draft}


@pytest.mark.parametrize(
    ("values", "method", "draft"),
    [
        ({}, "draft", str(family.DRAFT)),
        ({"method": "eagle"}, "eagle", f"{family.drafts()['eagle3']}-large"),
        ({"method": f"eagle:draft={family.drafts()['eagle1']}"}, f"eagle:draft={family.drafts()['eagle1']}-large", None),
        ({"method": "suffix"}, "suffix", None),
    ],
)
def test_a_plan_is_inflated_with_the_heads_of_its_method(
    values, method, draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(source: str, target: str) -> str:
        return source if source == str(family.DRAFT) else f"{source}-large"

    (tmp_path / "config.json").write_text('{"outrider_inflated": {}}')
    monkeypatch.setattr("outrider.bench.inflate.inflated", lambda source, size: tmp_path)
    monkeypatch.setattr(session, "inflated_draft", large)
    plan = bench_serve.inflated_plan(Plan({"compile": "always", **values}), "1b")
    assert plan.values == {"compile": "always", "target": str(tmp_path), "method": method} | ({"draft": draft} if draft else {})


def test_the_drafter_of_an_inflated_plan_may_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(models: Any) -> None:
        raise OutriderError(f"download: {models.download_draft}")

    monkeypatch.setattr(session, "auto_method", stop)
    for download in (True, False):
        with pytest.raises(OutriderError, match=f"download: {download}"):
            bench_serve.inflated_plan(Plan({"download_draft": download}), "1b")


def test_a_target_that_fails_is_not_the_users_mistake() -> None:
    assert app.explain(OutriderError("the target failed: RuntimeError: odd")) == (
        "the target failed: RuntimeError: odd", app.EXIT_INTERNAL
    )  # fmt: skip
    said, code = app.explain(OutriderError("the target failed: RuntimeError: CUDA out of memory"))
    assert "--max-len" in said and code == app.EXIT_INTERNAL


def test_a_target_that_fails_in_the_middle_leaves_the_text(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.runner import ModelRunner

    score, calls = ModelRunner.score, []

    def failing(*given: object, **options: object) -> object:
        calls.append(1)
        if len(calls) > 3:
            raise MemoryError("out of memory")
        return score(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "score", failing)
    code, out, err = outrider("generate", "--target", target, "--method", "plain", "--compile", "never", PROMPT)
    assert code == app.EXIT_INTERNAL and out.strip() and out.endswith("\n") and "out of memory" in err.splitlines()[-1]


def test_bench_inflates(outrider: Run, target: Path, draft: Path, inflatable: None) -> None:
    code, out, err = outrider(
        "bench", *models(target, draft), "--inflate", "1b", "--method", "draft", "-k", 2, "--workloads", "code",
        "--num-prompts", 1, "--max-tokens", 7, "--repeat", 1, "--max-len", 500,
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert result["target"].startswith("target-1b-")  # and without the path of the cache
    assert result["inflated"]["size"] == "1b" and result["inflated"]["parameters"] > 1_000_000
    assert result["cells"][1]["mean_acceptance_length"] > 2.5  # the draft copies the source, whose function is kept


@pytest.mark.parametrize("error", [MemoryError("x"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))])
def test_out_of_memory_is_not_a_usage_error(error: Exception) -> None:
    message, code = app.explain(error)
    assert code == app.EXIT_INTERNAL and "--max-len" in message


@pytest.mark.parametrize("signalled", [True, False])
def test_an_import_interrupted_by_a_signal_is_an_interruption(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch, signalled: bool
) -> None:
    def load(*_: object, **__: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            if signalled:
                signal.raise_signal(signal.SIGTERM)
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'")

    monkeypatch.setattr("outrider.cli.session.load", load)
    code, _, err = outrider("generate", "--target", target, "hi")
    assert (code, err.strip().endswith("interrupted")) == ((130, True) if signalled else (1, False))


@pytest.mark.parametrize(
    ("draft", "method", "is_offline"),
    [
        (None, "suffix", True),
        ("nobody/nothing", "draft", False),
        (None, "draft:draft=nobody/nothing", False),
        (None, "cross-tokenizer:draft=gpt2", False),
        (None, "suffix+draft:draft.draft=gpt2", False),
        (None, "eagle:draft=mine", True),
        (None, "draft:draft=inflated", False),
    ],
)
def test_hub_access_is_disabled_only_if_nothing_can_come_from_the_hub(
    target: Path, monkeypatch: pytest.MonkeyPatch, draft: str | None, method: str, is_offline: bool
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read before, when it was imported
    monkeypatch.setattr(session, "_loaded", lambda *_: None)
    drafts = {"mine": target, "inflated": "nobody/nothing"}
    session.load_plain(ModelOptions(target=str(target), draft=draft, trust_remote_code=True), [method], drafts=drafts)
    assert "HF_HUB_OFFLINE" not in os.environ  # a folder may name a repository for its code
    session.load_plain(ModelOptions(target=str(target), draft=draft), [method], drafts=drafts)
    assert ("HF_HUB_OFFLINE" in os.environ) == is_offline_mode() == is_offline
