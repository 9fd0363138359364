"""Damaged files of an interrupted run are named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.heads.checkpoint import save_tensors
from outrider.runner.checkpoint_files import is_finite
from outrider.train.claims import check_or_record_identity, damaged_file_errors, exclusive, read_or_create_json
from outrider.types import OutriderError


@pytest.mark.parametrize("content", ["", "{", "5", "[]"])
def test_a_damaged_claim_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    check_or_record_identity(file, {"target": "a"})
    check_or_record_identity(file, {"target": "a"})
    file.write_text(content)
    for attempt in (lambda: check_or_record_identity(file, {"target": "a"}), lambda: read_or_create_json(file, dict)):
        with pytest.raises(OutriderError, match=r"cannot resume from .*run\.json \(.*\): delete it to start again") as error:
            attempt()
        assert str(tmp_path) in str(error.value)


def test_a_damaged_file_of_tensors_is_named(tmp_path: Path) -> None:
    file = tmp_path / "features_00000.safetensors"
    save_tensors(file, {"ids": torch.arange(9)})
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(OutriderError, match=r"cannot resume from .*features_00000\.safetensors \("), damaged_file_errors(file):
        load_file(file)


def test_large_finite_numbers_are_finite() -> None:
    assert is_finite(torch.full((4,), 3e38)) and is_finite(torch.ones(3, dtype=torch.int8))
    for value in (float("nan"), float("inf")):
        assert not is_finite(torch.tensor([1.0, value]))


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt.7.part").write_text("begun")
    with exclusive(tmp_path):
        assert not list(tmp_path.glob("*.part"))
