"""The Hugging Face hub: whether it is reachable, and its GGUF files, named as by llama.cpp (``owner/Model-GGUF:Q4_K_M``)."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from outrider.errors import OutriderError, first_line
from outrider.files import expanded

Source = TypeVar("Source")

NAME = re.compile(r"(\w[\w.-]*/[\w.-]*GGUF)(?::([\w.-]+))?", re.IGNORECASE)  # hub id, quantisation
# End of a file's name after the model's: quantisation, part. Qwen3-8B-Q4_K_M.gguf, Qwen3-8B-UD-Q4_K_XL-00001-of-00002.gguf
QUANTISATION = re.compile(r"(?:[-.]((?:UD-)?(?:I?Q|TQ|BF|F|MXFP)\d\w*))?(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
USUAL = ("Q4_K_M", "UD-Q4_K_XL", "Q8_0")  # the first of these that a repository has is used if none is named
OTHERS = ("mmproj", "imatrix")  # names of files that hold no model


def local_gguf(source: Source) -> Source | str:
    """Return the path of the GGUF file that a hub id names, downloaded if it is not in the cache; other sources as they are.

    Of a file in parts it is the first. Raises ``OutriderError`` if the repository or the quantisation does not exist.
    """
    found = NAME.fullmatch(source) if isinstance(source, str) else None
    if found is None or expanded(str(source)).exists():
        return source
    from huggingface_hub import snapshot_download

    repository, quantisation = found.groups()
    parts = chosen(repository, file_names(repository), quantisation)
    try:
        folder = snapshot_download(repository, allow_patterns=parts, local_files_only=not is_reachable())
        return str(Path(folder) / parts[0])
    except Exception as error:  # the hub client raises many kinds of exceptions
        raise OutriderError(f"cannot download {parts[0]} of {repository}: {first_line(error)}") from error


def file_names(repository: str) -> list[str]:
    """Return the names of a repository's files: of all on the hub, or, if that is unreachable, of those in the cache.

    Raises ``OutriderError`` if there is no such repository.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        if is_reachable():
            return list(HfApi().list_repo_files(repository))
    except Exception as error:  # the hub client raises many kinds of exceptions
        raise OutriderError(f"no model {repository!r} on the Hugging Face hub: {first_line(error)}") from error
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except Exception as error:
        raise OutriderError(
            f"no model {repository!r}: it is not in the download cache, and the Hugging Face hub is unreachable: check the name"
            f", or download a file first, with hf download {repository} FILE"
        ) from error
    return [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]


def chosen(repository: str, names: Sequence[str], quantisation: str | None) -> list[str]:
    """Return the file, or its parts in order, of a quantisation; None: the first of ``USUAL``, or the only one there is.

    Raises ``OutriderError`` with the quantisations that exist if there is no such file.
    """
    found: dict[str, dict[str, list[str]]] = {}  # quantisation -> name of the model -> parts
    for name in sorted(names):
        match, file = QUANTISATION.search(name), name.rpartition("/")[2]
        if match and not file.startswith(OTHERS):
            found.setdefault((match[1] or "").upper(), {}).setdefault(QUANTISATION.sub("", file), []).append(name)
    usual = (*USUAL, *found) if len(found) == 1 else USUAL
    wanted = (quantisation.upper(), f"UD-{quantisation.upper()}") if quantisation else usual
    models = next((found[each] for each in wanted if each in found), None)
    if models is None:
        there = f"it has {', '.join(sorted(filter(None, found)))}" if found else "it has no GGUF files of models"
        said = f"no file of {quantisation}" if quantisation else f"none of {', '.join(USUAL)}: name one as {repository}:TYPE"
        raise OutriderError(f"{repository} has {said}; {there}")
    return models[min(models, key=len)]  # heads have longer names than their models


@cache
def is_reachable() -> bool:
    """Return whether the hub is reachable. Behind a proxy this is unknown, so the answer is True."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((url.hostname or "", url.port or 443), timeout=5.0):
            return True
    except OSError:
        return False


def disable() -> None:
    """Disable hub access, also if huggingface_hub, which reads the variable when it is imported, is imported already."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
