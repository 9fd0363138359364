"""Record requests in a file, as traffic for ``outrider tune``."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import errors_as, without_path
from outrider.server.completions import CompletionBody
from outrider.server.protocol import SamplingFields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Record:
    """Append request bodies to a file, one prompt per line. Not thread-safe.

    A separate thread writes, so that the tokenizer's thread, which calls ``add``, does not wait for a slow disk.
    """

    def __init__(self, file: Path, model: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """``model``: model name to write. Raises ``OutriderError`` if the file cannot be written."""
        self._model, self._tokenizer = model, tokenizer
        self._writer = ThreadPoolExecutor(1, "outrider-record")
        with errors_as(f"cannot write --record {file}", OSError, detail=without_path):
            self._file = open(file, "a", encoding="utf-8", opener=_private)  # noqa: SIM115 - open for the server's lifetime

    def add(self, body: SamplingFields) -> None:
        """Queue a request for writing. If writing fails, log a warning; the response is not affected."""
        try:
            lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines(body)]
        except ValueError as error:  # a schema that is not used, because a call is forced, is nested too deep
            logger.warning("a request was not recorded: %s", error)
        else:
            self._writer.submit(self._write, lines)

    def _write(self, lines: Sequence[str]) -> None:
        try:
            self._file.writelines(lines)
            self._file.flush()
        except (OSError, UnicodeEncodeError) as error:  # half a character in such a schema
            logger.warning("a request was not recorded: %s", error)

    def close(self) -> None:
        """Wait until everything is written, and close the file. If writing fails, log a warning."""
        self._writer.shutdown()
        try:
            self._file.close()
        except OSError as error:  # the disk is full
            logger.warning("the last requests were not recorded: %s", error)

    def _lines(self, body: SamplingFields) -> Iterator[dict[str, Any]]:
        # The temperature is written even if it is not set: in traffic of other servers its default is OpenAI's.
        given = body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"model"})
        line = {"model": self._model, "temperature": body.temperature, **given}
        if not isinstance(body, CompletionBody):
            yield line
            return
        for prompt in body.prompts():
            if isinstance(prompt, str):
                yield line | {"prompt": prompt}
            elif self._tokenizer is not None:
                yield line | {"prompt": self._tokenizer.decode(prompt)}


def _private(path: str, flags: int) -> int:
    """Open a file and make it readable by its owner only, also if it exists. Raises ``OSError`` for a link outside /dev."""
    flags |= 0 if os.path.dirname(path) in ("/dev", "/dev/fd") else os.O_NOFOLLOW  # anyone may put links into shared folders
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, "it is a symbolic link, and prompts go to the named file only: name its target") from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) and mode & 0o077:
        try:
            os.fchmod(descriptor, 0o600)
        except OSError as error:
            logger.warning("%s holds prompts and can be read by others: %s", path, error.strerror)
    return descriptor
