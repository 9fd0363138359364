"""Names of the files that hold a model's weights, on this machine: one file, shards with an index, or GGUF files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePath

from outrider.errors import OutriderError
from outrider.files import GGUF_PART, expanded, object_in, read_object

INDEX_SUFFIX = ".index.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_NAMES = ("model.safetensors", INDEXES[0], "pytorch_model.bin", INDEXES[1])  # transformers' order of preference
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
LOADED_NAMES = (*WEIGHT_NAMES, *MEDUSA_FILES)  # in order of preference


def on_this_machine(source: str | Path) -> Path | None:
    """Return a local folder, or the folder of a hub id in the download cache; None otherwise."""
    from huggingface_hub import constants, try_to_load_from_cache

    path = expanded(source)
    if str(source) and os.path.isdir(path):
        return path
    try:
        config = try_to_load_from_cache(str(source), "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # not a hub id
        return None
    return Path(config).parent if isinstance(config, str) else None


def weight_files(source: str | Path) -> list[Path]:
    """Return the weight files that are loaded from a folder (of one format only), a cached hub id, or a GGUF file or part.

    A broken index has none: it is reported when the model is loaded.
    """
    path = expanded(source)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return gguf_parts(path)
    folder = on_this_machine(source)
    if folder is None:
        return []
    names: list[str] = []
    with suppress(OSError, OutriderError):
        main = weights_or_index(folder)
        names = [file.name for file in folder.glob("*.gguf")] if main is None else indexed_files(folder, main)
    return sorted(file for file in map(folder.joinpath, names) if file.is_file())  # no links to files deleted from a cache


def weight_bytes(source: str | Path) -> int:
    """Return the size of ``weight_files``; 0 if there are none on this machine."""
    return sum(file.stat().st_size for file in weight_files(source))


def weights_or_index(folder: Path) -> str | None:
    """Return the file that is loaded: the weights, or their index, that config.json states, else the first that exists.

    Raises ``OutriderError`` as ``stated_weights``.
    """
    return stated_weights(folder) or next((name for name in LOADED_NAMES if (folder / name).is_file()), None)


def stated_weights(folder: Path) -> str | None:
    """Return the name of the weights, or of their index, in a folder's config.json; None if it states none.

    transformers then loads no other file. Raises ``OutriderError`` for one outside the folder.
    """
    config = folder / "config.json"
    name = object_in(config).get("transformers_weights")
    if not isinstance(name, str):
        return None
    _refuse_outside(name, config)
    return name


def _refuse_outside(name: str, file: Path) -> None:
    """Raise ``OutriderError`` if the name of weights in a file, which may be a stranger's, leads out of the file's folder."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise OutriderError(f"{file} names weights outside its folder, {name}: expected the name of a file in it")


def indexed_files(folder: Path, main: str, prefix: str = "") -> list[str]:
    """Return the names of the files that an index lists for tensors whose names begin with ``prefix``.

    For a weight file, its own name. ``main``: see ``weights_or_index``. Raises ``OutriderError`` for a broken index.
    """
    if not main.endswith(INDEX_SUFFIX):
        return [main]
    return sorted({file for tensor, file in weight_map(folder / main).items() if tensor.startswith(prefix)})


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor by an index. Raises ``OutriderError`` if it is missing or not an index."""
    files = read_object(index, f"{index} is not a weight index").get("weight_map")
    if not isinstance(files, dict) or not all([isinstance(file, str) for file in files.values()]):
        raise OutriderError(f"{index} is not a weight index: expected the file name of each tensor")
    for file in {*files.values()}:
        _refuse_outside(file, index)
    return files


def gguf_parts(path: Path) -> list[Path]:
    """Return a GGUF file, or, for a part of one that llama.cpp split, all parts that exist beside it, in order."""
    part = GGUF_PART.fullmatch(path.stem)
    if part is None:
        return [path]
    own = {file: GGUF_PART.fullmatch(file.stem) for file in path.parent.glob("*.gguf") if file.is_file()}
    return sorted(file for file, found in own.items() if found and found.groups() == part.groups())
