"""The documentation is correct: its example and the examples run, and its command-line page is up to date."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_folder import make_folder
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from outrider import LLM
from outrider.registry import PROPOSERS
from outrider.types import OutriderError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("docs") / "model")


@pytest.fixture
def embedded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the embedded family by the tiny model."""
    monkeypatch.setattr("outrider.family.TARGET", model)
    monkeypatch.setattr("outrider.family.DRAFT", model)


def test_the_examples_of_add_a_proposer_run(
    embedded: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PROPOSERS, "_entries", dict(PROPOSERS._entries))
    page = (ROOT / "docs" / "add-a-proposer.md").read_text()
    monkeypatch.setitem(sys.modules, "example", ModuleType("example"))
    scope = vars(sys.modules["example"])
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(example, "add-a-proposer.md", "exec"), scope)
    assert LLM(method="line:newline=;").proposer.name == "line"
    with pytest.raises(OutriderError, match="no option width; it has newline"):
        LLM(method="line:width=3")
    assert scope["completion"].stats.faults == 0
    assert scope["completion"].stats.num_tokens == 40
    propose = scope["LineProposer"](newline_id=9)._rest_of_line
    assert propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2]) == [4, 9]
    assert propose([1, 2, 3, 9]) == []
    assert capsys.readouterr().out


def test_the_example_of_the_readme_runs(embedded: None, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples[0].strip().splitlines()) <= 6
    exec(compile(examples[0], "README.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "takes_folder"), [("generate", False), ("custom_proposer", False), ("transformers_model", True)]
)
def test_examples_run(
    name: str,
    takes_folder: bool,
    model: Path,
    embedded: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = ROOT / "examples" / f"{name}.py"
    assert len(file.read_text().splitlines()) <= 60
    monkeypatch.setattr(sys, "argv", [str(file), str(model)] if takes_folder else [str(file)])
    runpy.run_path(str(file), run_name="__main__")
    out = capsys.readouterr().out
    assert "per target pass" in out or "faults: 0" in out


def test_the_example_proposer_knows_its_sentences_without_the_tokenizers_first_token(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin  # as in Llama 3 and Gemma
    make_folder(tmp_path, tokenizer=tokenizer)
    scope = runpy.run_path(str(ROOT / "examples" / "custom_proposer.py"))
    made: list[LLM] = []

    def recorded(*given: Any, **options: Any) -> LLM:
        made.append(LLM(*given, **options))
        return made[-1]

    monkeypatch.setitem(scope["main"].__globals__, "LLM", recorded)
    scope["main"](str(tmp_path))
    assert made[0].tokenizer.encode("I")[0] == tokenizer.bos_token_id
    sentences = made[0].proposer.sentences
    assert len(sentences) == 3 and not any(tokenizer.bos_token_id in sentence for sentence in sentences)


def test_the_examples_import_public_names_only() -> None:
    """``outrider`` exports them all."""
    texts = {file.name: file.read_text() for file in [ROOT / "README.md", *(ROOT / "examples").glob("*.py")]}
    guide = (ROOT / "docs" / "add-a-proposer.md").read_text()
    texts["add-a-proposer.md"] = guide.split("## A complete example")[1].split("## ")[0]
    for name, text in texts.items():
        modules = re.findall(r"^\s*(?:from|import) (outrider\S*)", text, re.M)
        assert modules and set(modules) == {"outrider"}, name


def test_every_example_is_tested() -> None:
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == {"generate", "custom_proposer", "transformers_model"}


def test_the_command_line_page_is_up_to_date() -> None:
    """The page of options too."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_cli.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_defaults_of_0_and_1_are_listed() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert "before a long run (default: auto; always in compare, bench, tune, audit, demo and serve)." in page
    assert "Seed of arrivals and sampling (default: 0)." in page and "answer to the one before (default: 1)." in page


@pytest.mark.parametrize("command", ["audit", "tune", "bench", "demo"])
def test_commands_that_compare_methods_do_not_offer_the_baseline(command: str) -> None:
    _, section = (ROOT / "docs" / "cli.md").read_text().split(f"## outrider {command}\n")
    methods = next(line for line in section.splitlines() if line.startswith("| `--method` |"))
    assert "plain" not in methods and "draft, cross-tokenizer" in methods


def test_an_audit_offers_no_stop_conditions() -> None:
    """It would ignore them."""
    _, rest = (ROOT / "docs" / "cli.md").read_text().split("## outrider audit\n")
    section = rest.split("\n## ")[0]
    assert "`--max-tokens`" in section and not re.findall("`--(?:stop|min-tokens|ignore-eos)`", section)


def test_links_and_files_named_in_the_documentation_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    missing = []
    for page in pages:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (page.parent / link).exists():
                missing.append(f"{page.name}: {link}")
        for name in re.findall(r"`((?:engine|runner|proposers|verifiers|tune|bench|cli)/[\w/]*\.py)`", text):
            if not any((folder / name).exists() for folder in (ROOT / "src" / "outrider", ROOT)):
                missing.append(f"{page.name}: {name}")
    assert not missing


def test_one_round_is_shown_in_a_dozen_files() -> None:
    _, section = (ROOT / "docs" / "structure.md").read_text().split("in twelve files\n")
    steps = section.split("\nAround them")[0]
    files = re.findall(r"`((?:\w+/)?\w+\.py)`", steps)
    assert len(set(files)) == 12 and all((ROOT / "src" / "outrider" / file).exists() for file in files)


def test_anchors_and_options_named_in_the_documentation_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    anchors = {page.resolve(): {anchor(line) for line in re.findall(r"^#+ (.*)$", page.read_text(), re.M)} for page in pages}
    options = set(re.findall(r"--[a-z][\w-]*", (ROOT / "docs" / "cli.md").read_text())) | {"--help"}
    missing = []
    for page in pages:
        text = page.read_text()
        for link, name in re.findall(r"\]\(([^)#\s:]*)#([^)]+)\)", text):
            target = (page.parent / link).resolve() if link else page.resolve()
            if name not in anchors.get(target, set()):
                missing.append(f"{page.name}: {link}#{name}")
        if page.name == "results.md":  # its commands have the options of their commits
            continue
        for command in re.findall(r"(?:^|`|\$ )outrider ([^`#\n]*)", text, re.M):
            own = re.findall(r"(?<!\S)--[a-z][\w-]*", command.split(" -- ")[0])  # arguments after -- are for another engine
            missing += [f"{page.name}: {option}" for option in own if option not in options]
    assert not missing


def test_the_log_is_indexed_and_its_entries_are_short() -> None:
    log = ROOT / "docs" / "log"
    topics = sorted(log.glob("*.md"))
    topics.remove(log / "README.md")
    links = re.findall(r"^\| \[.*?\]\((.*?)\)", (log / "README.md").read_text(), re.M)
    assert topics == sorted(log / link for link in links)
    for topic in topics:
        for entry in topic.read_text().split("\n## ")[1:]:
            title, *lines = entry.splitlines()
            assert re.match(r"20\d\d-\d\d-\d\d: ", title), f"{topic.name}: {title}: expected YYYY-MM-DD: question"
            # A table row counts as one line; longer text counts as the lines of 128 characters that it would fill.
            size = sum(1 if line.startswith("|") else -(-len(line) // 128) for line in lines)
            assert size <= 15, f"{topic.name}: {title}: more than 15 lines"


def anchor(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_help_of_a_declared_option_shows_its_default() -> None:
    import typer

    from outrider.cli.app import build_app
    from outrider.types import SamplingParams

    command = typer.main.get_command(build_app()).commands["generate"]  # type: ignore[attr-defined]
    helps = {parameter.name: parameter.help for parameter in command.params}
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        assert f"(default: {getattr(SamplingParams(), name):g})." in helps[name]
    assert "(default: auto)" in helps["num_draft_tokens"] and "(default: block)" in helps["verifier"]
