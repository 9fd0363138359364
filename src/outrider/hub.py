"""The Hugging Face hub: downloads of the files that are loaded, after checks and with progress.

GGUF files are named as by llama.cpp (``owner/Model-GGUF:Q4_K_M``).
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from logging import INFO, getLogger
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from outrider.errors import OutriderError
from outrider.files import expanded, is_path
from outrider.hub_errors import explained, is_unreachable, what_it_is
from outrider.memory import require_disk, require_memory, size
from outrider.progress import PERIOD, reported_every
from outrider.weight_files import (
    INDEX_SUFFIX,
    LOADED_NAMES,
    WEIGHT_NAMES,
    indexed_files,
    on_this_machine,
    stated_weights,
    weight_files,
    weights_or_index,
)

logger = getLogger(__name__)

Source = TypeVar("Source")

CONFIG = ("config.json",)
TOKENIZER = (*CONFIG, "tokenizer_config.json", "tokenizer.json")
SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")  # endings of the files beside the weights that are read
OFFLINE = "the Hugging Face hub is unreachable or HF_HUB_OFFLINE is set"
FAILS = "the Hugging Face hub fails"  # although it is reachable: it answers with an error
TIMEOUT: Any = 5.0, 30.0, 30.0, 5.0  # seconds to connect to the hub, to read, to write, and to get a connection
CHUNK = 1 << 18  # bytes that are written at once; the hub client's 10 MiB hide the progress of a slow download

# hub id, and quantisation or file; without these the id must say that it is one of GGUF files
NAME = re.compile(r"(\w[\w.-]*/(?:[\w.-]+(?=:)|[\w.-]*GGUF))(?::([\w./-]+))?", re.IGNORECASE)
# End of a file's name after the model's: quantisation, part. Qwen3-8B-Q4_K_M.gguf, Qwen3-8B-UD-Q4_K_XL-00001-of-00002.gguf
QUANTISATION = re.compile(r"(?:[-.]((?:UD-)?(?:I?Q|TQ|BF|FP?|MXFP|NVFP)\d\w*))?(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
CACHED = re.compile(r"(.*/models--([\w.-]+?)--([\w.-]+)/snapshots/\w+)/([\w./-]+\.gguf)")  # a path in the download cache
USUAL = ("Q4_K_M", "UD-Q4_K_XL", "Q8_0")  # the first of these that a repository has is used if none is named
NO_MODEL = re.compile(r"mmproj|^imatrix|imatrix\.gguf$", re.IGNORECASE)  # in names of files that hold no model


def local_gguf(source: Source) -> Source | str:
    """Return the path of the GGUF file that a hub id names, downloaded if it is not in the cache; other sources as they are.

    Of a file in parts it is the first. Raises ``OutriderError`` if the repository or the quantisation does not exist.
    """
    found = _named_gguf(source)
    if found is None:
        return source
    repository, parts = _files_of_named(*found.groups())
    folder = _cached_snapshot(found[1]) if repository is None else _downloaded(found[1], parts)
    return str(folder / parts[0])


def _files_of_named(repo_id: str, quantisation: str | None) -> tuple[Repository | None, list[str]]:
    """Return the repository, None if the cache must do, and the names of the file or its parts.

    Raises ``OutriderError`` if the repository or the quantisation does not exist.
    """
    repository = _current(repo_id)
    if repository is not None:
        return repository, files_of_quantisation(repo_id, list(repository.sizes), quantisation)
    folder = _cached_snapshot(repo_id)
    names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    try:
        return None, files_of_quantisation(repo_id, names, quantisation)
    except OutriderError as error:
        raise OutriderError(f"{error} in the download cache, and {_listed_unless_offline(repo_id).problem}") from None


def is_gguf_id(source: object) -> bool:
    """Return whether a source is a hub id that names a GGUF file."""
    return _named_gguf(source) is not None


def id_of_cached(path: str) -> str:
    """Return the hub id of a GGUF file in the download cache, which is valid on other machines too; other paths as they are.

    Ids mean the newest revision, so that a file of an older one keeps its path.
    """
    found = CACHED.fullmatch(path)
    main = found and _newest_snapshot(f"{found[2]}/{found[3]}")
    is_newest = found and main and os.path.realpath(main) == os.path.realpath(found[1])
    return f"{found[2]}/{found[3]}:{found[4]}" if found and is_newest else path


def _named_gguf(source: object) -> re.Match[str] | None:
    found = NAME.fullmatch(source) if isinstance(source, str) and not _is_file_name(source) else None
    return None if found is None or os.path.exists(expanded(found[0])) else found


def _is_file_name(source: str) -> bool:
    """Return whether a source is the name of a GGUF file, perhaps a missing one, and not one in a repository."""
    return source.endswith(".gguf") and ":" not in source


def _cached_snapshot(repo_id: str, why: str = OFFLINE) -> Path:
    """Return the folder of a repository in the download cache. Raises ``OutriderError`` if there is none."""
    folder = _newest_snapshot(repo_id)
    if folder is None:
        raise OutriderError(
            f"no model {repo_id!r}: it is neither a local folder nor in the download cache, and {why}: check the name,"
            f" or download it first with hf download {repo_id}{' FILE' if 'gguf' in repo_id.lower() else ''}"
        )
    return folder


def files_of_quantisation(repo_id: str, names: Sequence[str], quantisation: str | None) -> list[str]:
    """Return the file, or its parts in order, of a quantisation; None: the first of ``USUAL``, or the only one there is.

    ``quantisation``: also the name of a file. A model precedes its heads, whose names contain the model's. Raises
    ``OutriderError`` with what exists if there is no such file, or files of several models.
    """
    found: dict[str, dict[str, list[str]]] = {}  # quantisation -> name of the model -> parts
    for name in sorted(names):
        match, file = QUANTISATION.search(name), name.rpartition("/")[2]
        if match and NO_MODEL.search(file) is None:
            found.setdefault((match[1] or "").upper(), {}).setdefault(QUANTISATION.sub("", file), []).append(name)
    for parts in (parts for models in found.values() for parts in models.values()):
        if quantisation in (*parts, *(name.rpartition("/")[2] for name in parts)):
            return parts
    usual = (*USUAL, *found) if len(found) == 1 else USUAL
    wanted = (quantisation.upper(), f"UD-{quantisation.upper()}") if quantisation else usual
    models = next((found[each] for each in wanted if each in found), None)
    if models is None:
        untyped = sorted(parts[0] for parts in found.pop("", {}).values())
        content = f"it has {', '.join([*sorted(found), *untyped]) or 'no GGUF files of models'}"
        lack = f"no file of {quantisation}" if quantisation else f"none of {', '.join(USUAL)}: name one as {repo_id}:TYPE"
        raise OutriderError(f"{repo_id} has {lack}; {content}")
    shortest = min(models, key=len)
    if not all(shortest.lower() in name.lower() for name in models):
        files = ", ".join(parts[0] for parts in models.values())
        raise OutriderError(f"{repo_id} has files of several models: name one as {repo_id}:FILE; it has {files}")
    return models[shortest]


@dataclass
class Repository:
    """What a repository on the hub holds now."""

    commit: str
    sizes: dict[str, int]  # of its files, by name
    blobs: dict[str, str] = field(default_factory=dict)  # names of large files in the cache's folder of blobs, by name
    problem: str = ""  # why only the cache is used, as part of an error's sentence


def is_hub_id(source: object) -> bool:
    """Return whether a source is the name of a repository, and neither a path nor a file."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if not isinstance(source, (str, Path)) or not str(source) or is_path(source) or os.path.exists(expanded(source)):
        return False
    if _is_file_name(str(source)):
        return False
    try:
        validate_repo_id(str(source))
    except ValueError:
        return False
    return True


def expected_of(source: object) -> str:
    """Say what was expected in place of a source that is neither on this machine nor a hub id."""
    repo_id, _, revision = str(source).partition("@")
    advice = (
        f"; of the hub only the branch main is used: download another with hf download {repo_id} --revision {revision}"
        " --local-dir FOLDER, and give the folder"
    )
    return f"expected a folder, a .gguf file or a Hugging Face id owner/name{advice if revision and is_hub_id(repo_id) else ''}"


def refuse_missing(source: str | Path) -> None:
    """Raise ``OutriderError`` unless a source is a folder, a GGUF file or a hub id."""
    path = expanded(source)
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf"):
        return
    if os.path.exists(path):
        raise OutriderError(f"{source} is a file: give the folder with config.json and the weights, or a .gguf file")
    if not is_hub_id(source):
        raise OutriderError(f"no model folder {str(source)!r}: {expected_of(source)}")


def fetch_configs(source: object, required: Collection[str] = CONFIG) -> None:
    """Download the small files of a hub id: configs, tokenizer, code. Nothing for other sources and without the hub.

    Raises ``OutriderError`` if it cannot be downloaded and is not in the cache, or has none of the ``required`` files.
    """
    repository = _repository(source)
    if repository is not None:
        _require(str(source), repository, required)
        names = [name for name in repository.sizes if "/" not in name and name.endswith(SMALL)]
        _downloaded(str(source), names, [name for name in repository.sizes if name in required])


def _require(source: str, repository: Repository, required: Collection[str]) -> None:
    """Raise ``OutriderError`` if a repository has none of the ``required`` files."""
    if not any(name in repository.sizes for name in required):
        why = what_it_is(repository.sizes) or "it has no config.json"
        raise OutriderError(f"{source} is not a model that can be loaded: {why}")


def check_repository(source: object, is_loaded_here: bool = False) -> None:
    """Download the small files of a hub id. Nothing for other sources and, except of GGUF files, without the hub.

    Raises ``OutriderError`` if there is no such repository, if the hub refuses it, or if it has no weights that can be loaded:
    before anything large, also of other models of the same command, is downloaded.

    ``is_loaded_here``: a GGUF file must not exceed the memory. Other weights are checked when their config is known
    (``fetch_weights``).
    """
    found = _named_gguf(source)
    if found is not None:
        repository, parts = _files_of_named(*found.groups())
        if repository is not None and is_loaded_here:
            _require_memory(str(source), repository, parts, 1.0)
        return
    repository = _repository(source)
    if repository is not None:
        _require(str(source), repository, CONFIG)
        _weights_of(str(source), repository)  # before the download of the configs
        fetch_configs(source)


def _require_memory(source: str, repository: Repository, names: Sequence[str], growth: float) -> None:
    """Raise ``OutriderError`` if the weights in these files exceed the memory. ``growth``: bytes there per byte in files."""
    total = sum(repository.sizes.get(name, 0) for name in names)
    require_memory(round(growth * total), f"the weights of {source} take", "choose a smaller or a quantised checkpoint")


def fetch_weights(source: object, growth: float = 0.0) -> None:
    """Download the weights of a hub id that are loaded, in one format only. Nothing for other sources and without the hub.

    ``growth``: bytes in memory per byte in the files; 0 if unknown. Raises ``OutriderError`` if there are none, or, before a
    download, if they exceed the memory or the disk.
    """
    repository = _repository(source)
    if repository is None:
        folder = on_this_machine(str(source)) if is_hub_id(source) else None
        main = folder and weights_or_index(folder)
        if folder and (_lacks(folder, indexed_files(folder, main)) if main else not weight_files(folder)):
            why = f"are not in the download cache, and {_listed_unless_offline(str(source)).problem}"
            raise OutriderError(f"the weights of {source} {why}: download them first with hf download {source}")
        return
    names = _weights_of(str(source), repository)
    # A cached model is checked by its loader, a cached head is not.
    if _lacks(_cache_folder(str(source)) / "snapshots" / repository.commit, names):
        _require_memory(str(source), repository, names, growth)
    _downloaded(str(source), names)


def is_cached_only(source: object) -> bool:
    """Return whether a hub id must come from the cache, because the hub fails or is unreachable.

    Otherwise transformers would repeat each request several times.
    """
    return is_hub_id(source) and _repository(source) is None


def fetch(source: str) -> Path:
    """Download the configs and weights of a hub id and return their folder. Raises ``OutriderError`` if there is none."""
    refuse_missing(source)
    check_repository(source)
    fetch_weights(source, growth=1.0)
    return on_this_machine(source) or _cached_snapshot(source)


def _repository(source: object) -> Repository | None:
    """Return ``_current`` of a hub id; None for other sources."""
    return _current(str(source)) if is_hub_id(source) else None


def _current(name: str) -> Repository | None:
    """Return what a repository on the hub holds; None if the download cache must do.

    Raises ``OutriderError`` if the cache has no such repository either.
    """
    found = _listed_unless_offline(name)
    if not found.problem:
        return found
    _cached_snapshot(name, found.problem)
    return None


def _listed_unless_offline(name: str) -> Repository:
    """Return ``_listed``; an empty repository with the problem while access to the hub is disabled."""
    from huggingface_hub import constants

    is_disabled = constants.HF_HUB_OFFLINE  # also set by TRANSFORMERS_OFFLINE
    return Repository("", {}, problem=OFFLINE) if is_disabled else _listed(name)


def is_offline(source: object) -> bool:
    """Return whether a source is a hub id, and the hub is unreachable."""
    return is_hub_id(source) and _listed_unless_offline(str(source)).problem == OFFLINE


@cache
def _listed(name: str) -> Repository:
    """Ask the hub, once per process, what a repository holds; with a ``problem`` if it is unreachable, or fails and the cache
    has the repository.

    Raises ``OutriderError`` if there is no such repository, or the hub refuses it.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name, timeout=TIMEOUT, files_metadata=True)
    except Exception as error:  # the hub client raises many kinds of exceptions
        if is_unreachable(error):
            return Repository("", {}, problem=OFFLINE)
        if _newest_snapshot(name) is None:
            raise OutriderError(explained(name, error)) from error
        logger.info("%s: using the download cache", explained(name, error))
        return Repository("", {}, problem=FAILS)
    if info.id != name:
        logger.warning("%s is %s on the hub: with this name, files are not downloaded a second time", name, info.id)
    files = info.siblings or []
    blobs = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
    return Repository(info.sha or "", {file.rfilename: file.size or 0 for file in files}, blobs)


def _weights_of(source: str, repository: Repository) -> list[str]:
    """Return the files of the weights that are loaded, and their index. Raises ``OutriderError`` if there are none."""
    names = repository.sizes
    stated = stated_weights(_downloaded(source, CONFIG)) if CONFIG[0] in names else None
    main = stated or next((name for name in LOADED_NAMES if name in names), None)
    if main is None or main not in names:
        raise OutriderError(f"{source} has no weights in a known format: {expected_weights(names, stated)}")
    if not main.endswith(INDEX_SUFFIX):
        return [main]
    shards = indexed_files(_downloaded(source, [main]), main)
    if not repository.problem and (missing := [name for name in shards if name not in names]):  # else an older index
        raise OutriderError(f"{source} lacks {missing[0]}, which its {main} names: choose another repository")
    return [main, *shards]


def expected_weights(names: Collection[str], stated: str | None = None) -> str:
    """Say why files of these names are not the weights of a model. ``stated``: the file that config.json names, if any."""
    expected = f"{stated}, which config.json names" if stated else f"{WEIGHT_NAMES[0]} or {WEIGHT_NAMES[2]}"
    return what_it_is(names) or f"expected {expected}"


def _downloaded(repo_id: str, names: Sequence[str], needed: Sequence[str] | None = None) -> Path:
    """Download files that are not in the cache, and return the folder.

    If this fails, the cache is used from then on, with a warning, if it has the files that are ``needed``, by default all.
    Raises ``OutriderError`` in one line if it does not.
    """
    repository, needed = _listed(repo_id), names if needed is None else needed
    folder, cached = _cache_folder(repo_id) / "snapshots" / repository.commit, _newest_snapshot(repo_id)
    missing = [name for name in names if not (folder / name).exists()]
    if not missing and cached == folder:
        return folder
    if repository.problem and cached is not None and not _lacks(cached, needed):
        return cached
    blobs = _cache_folder(repo_id) / "blobs"
    num_bytes = sum(repository.sizes.get(name, 0) for name in missing if not (blobs / repository.blobs.get(name, "")).is_file())
    try:
        found = _fetched(repo_id, names, num_bytes)
        if _lacks(found, needed) or found == cached != folder:  # the hub client returns an older folder if the hub fails
            raise OSError(FAILS)
        return found
    except Exception as error:  # the hub client raises many kinds of exceptions
        problem = error if isinstance(error, OutriderError) else OutriderError(explained(repo_id, error))
        if cached is None or _lacks(cached, needed):
            raise problem from error
    with suppress(OSError):  # the hub client has begun with this change, unless the cache is read-only
        (_cache_folder(repo_id) / "refs" / "main").write_text(cached.name)
    repository.problem = FAILS
    logger.warning("%s; the files in the download cache are used", problem)
    return cached


def _fetched(repo_id: str, names: Sequence[str], num_bytes: int) -> Path:
    """Download files, and return the folder. Raises ``OutriderError`` if they exceed the disk, or the hub's exceptions."""
    from huggingface_hub import constants

    cache_folder = Path(constants.HF_HUB_CACHE)
    cache_folder.mkdir(parents=True, exist_ok=True)
    require_disk(
        cache_folder, num_bytes, f"downloading {repo_id} takes", "delete files, or set HF_HOME to a folder on a larger disk"
    )
    with _shown(repo_id, num_bytes):
        return _snapshot(repo_id, names)


def _lacks(folder: Path, names: Sequence[str]) -> bool:
    return not all((folder / name).exists() for name in names)


def _snapshot(repo_id: str, names: Sequence[str]) -> Path:
    """Download files. Ctrl-C ends it within one ``CHUNK`` of each file: the hub client alone would first finish the files."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    is_interrupted = Event()

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if is_interrupted.is_set():
                raise InterruptedError("the download was interrupted")
            return super().update(n)

    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, CHUNK)
    with ThreadPoolExecutor(1) as pool:
        folder = pool.submit(snapshot_download, repo_id, allow_patterns=[*map(glob.escape, names)], tqdm_class=Bar)
        try:
            return Path(folder.result())
        except BaseException:
            is_interrupted.set()
            raise


def _cache_folder(repo_id: str) -> Path:
    """Return the folder of a repository in the download cache, which may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")


def _newest_snapshot(repo_id: str) -> Path | None:
    """Return the folder of a repository's newest snapshot in the download cache; None if there is none."""
    folder = _cache_folder(repo_id)
    with suppress(OSError):
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text()
        return snapshot if snapshot.is_dir() else None
    return None


@contextmanager
def _shown(repo_id: str, needed: int) -> Iterator[None]:
    """Log the progress of a download in place of the hub client's bars. Without a logger for it, the bars stay."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if not logger.isEnabledFor(INFO):
        yield
        return
    blobs = _cache_folder(repo_id) / "blobs"
    before, was_disabled = _bytes_in(blobs), are_progress_bars_disabled()

    def report(elapsed: float) -> None:
        done = max(0, _bytes_in(blobs) - before)
        left = (needed - done) * elapsed / done if done else 0.0
        rest = f", about {left:.0f} s left" if 0 < left < 120 else f", about {left / 60:.0f} min left" if left else ""
        logger.info("downloading %s: %s of %s%s", repo_id, size(done), size(needed), rest, extra={"is_progress": True})

    disable_progress_bars()
    started = time.monotonic()
    try:
        with reported_every(PERIOD, report):
            yield
    finally:
        if not was_disabled:
            enable_progress_bars()
    if time.monotonic() - started > PERIOD:
        logger.info("downloaded %s: %s in %.0f s", repo_id, size(needed), time.monotonic() - started)


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.glob("*"):
        with suppress(OSError):  # renamed or removed meanwhile
            total += file.stat().st_size
    return total


def disable() -> None:
    """Disable hub access, also if huggingface_hub, which reads the variable when it is imported, is imported already."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
