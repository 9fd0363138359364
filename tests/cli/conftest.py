"""A tiny family shared by all tests of the command line, and a function that runs a command in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_folder import make_folder, make_tokenizer


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "target", seed=0, max_position_embeddings=512)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the target, so that every draft is accepted."""
    return make_folder(tmp_path_factory.mktemp("models") / "draft", seed=0, max_position_embeddings=512)


@pytest.fixture(scope="session")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "other", tokenizer=make_tokenizer(300))


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Return ``outrider("generate", "hi", stdin="...")`` -> exit code, stdout, stderr."""
    import io

    from outrider.cli import main

    def run(*args: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, args)])
        capsys.readouterr()
        code = main()
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
