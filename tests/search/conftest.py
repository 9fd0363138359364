"""A tiny target for the tests of the search."""

from __future__ import annotations

import pytest
from tiny_folder import make_folder

from outrider import LLM


@pytest.fixture(scope="package")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(make_folder(tmp_path_factory.mktemp("search") / "model"), method="plain", compile="never", max_batch=4)
