"""Find a drafter for a target: in its checkpoint, in neighbouring folders, or in the Hugging Face cache.

Only names, configs and tensor headers are read. ``MethodSpec.recognise`` of each method decides what fits.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from logging import DEBUG, INFO, getLogger
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from outrider.errors import first_line
from outrider.files import expanded
from outrider.heads.checkpoint import find_folder, kind_of, loose_files
from outrider.heads.gguf_heads import is_head as is_gguf_head
from outrider.hub import QUANTISATION, fetch, fetch_configs, is_hub_id, local_gguf
from outrider.memory import size
from outrider.method_text import join_method, split_method
from outrider.proposers.method import MethodSpec, TargetFiles
from outrider.registry import DEFAULT_METHOD, DEFAULT_METHOD_WITH_DRAFT, DEFAULT_METHOD_WITH_FOREIGN_DRAFT, PROPOSERS
from outrider.runner import gguf
from outrider.runner.tokenizers import DifferentVocabulary
from outrider.types import OutriderError
from outrider.weight_files import gguf_parts, on_this_machine, weight_bytes, weight_files

logger = getLogger(__name__)

PAIRS = Path(__file__).with_name("drafters.toml")
# What quantised copies add to a model's name (publisher_, -AWQ, ...), and "Meta-", with which Llama 3's first names begin.
AFFIXES = re.compile(
    r"^([^_]+_)?(Meta-)?|[.-]i1$|-(AWQ|FP8(-dynamic)?|NVFP4|GPTQ-Int[48]|quantized\.w\d+a\d+|(unsloth-)?bnb-4bit)$",
    re.IGNORECASE,
)
# Draft weights / target weights, unless the folder's name says that it is a draft: families have a third (0.5B for 1.5B, 1B for
# 3B), and such drafts pay (docs/log/models.md).
LARGEST, SMALLEST = 2 / 5, 1 / 200
OWN, NEXT_TO, INSIDE = "in the target's checkpoint", "found next to the target", "found in the target's folder"
KNOWN = "known for the target"
FAMILY, SIBLING = (
    "the smallest of the target's family in the download cache",
    "the smallest of the target's family in its folder",
)


@dataclass(frozen=True)
class Candidate:
    """A possible drafter: recognised by a method, or listed for the target."""

    name: str  # a folder, a file or a hub id
    where: str
    source: Path | None = None  # None: the target's own checkpoint, or nothing on this machine
    method: str = ""  # method that uses it
    what: str = ""  # "EAGLE-3 head"
    num_bytes: int = 0
    share: float | None = None  # its weights / the target's weights
    precedence: int = 0
    misfit: str = ""  # why it cannot be used
    is_foreign: bool = False  # whether it has another tokenizer
    is_absent: bool = False  # whether it is listed for the target but not on this machine

    @property
    def line(self) -> str:
        """Return a description, such as "draft model Qwen/Qwen3-0.6B, 1.5 GB, known for the target"."""
        named = f"{self.what} {self.name}".strip() or "a head"
        return ", ".join([named, *([size(self.num_bytes)] if self.num_bytes else []), self.where])


@dataclass(frozen=True)
class MethodChoice:
    """A method with its draft, and the reason for the choice."""

    method: str
    draft: Any = None
    what: str = ""  # description of the draft and where it was found
    is_found: bool = False  # found automatically: if it does not fit, the next choice is used

    @property
    def why(self) -> str:
        """Return the choice and its reason, in one line."""
        return f"drafts with {self.what}"

    @property
    def text(self) -> str:
        """Return the value of ``--method`` that names the found draft. Raises ``OutriderError`` for a path like an option."""
        if not self.is_found or self.draft is None:
            return self.method
        options = {"draft": str(self.draft)}
        text = join_method(self.method, options)
        if split_method(text)[1] != options:
            raise OutriderError(f"{self.draft}: a path with :name= cannot be an option of a method: give --draft and --method")
        return text


def choices(
    target: TargetFiles | None, draft: object, drafts: Mapping[str, object], download: bool = False
) -> Iterator[MethodChoice]:
    """Yield choices of method and draft, best first. The last one always fits.

    ``draft``: given by the user; ``drafts``: declared with the target. If there is one of these, it is the only choice.
    Otherwise candidates are searched, and each one that does not fit is logged in one line.
    """
    if draft is not None:
        named = str(draft) if isinstance(draft, (str, Path)) else type(draft).__name__
        yield MethodChoice(_method_for(draft, target), draft, f"{named}, as specified")
        return
    declared = [spec for spec in _methods() if spec.precedence and spec.own_draft in drafts]
    if declared:
        best = max(declared, key=lambda spec: spec.precedence)
        yield MethodChoice(best.name, None, f"{best.own_draft} (comes with the target)")
        return
    absent = ""
    for candidate in () if target is None else candidates(target, download):
        if candidate.is_absent:
            absent = absent or f"; --download-draft fetches {candidate.name}"
        elif candidate.misfit:
            is_usual = candidate.where in (FAMILY, SIBLING) and candidate.share is not None  # other sizes of the family
            logger.log(DEBUG if is_usual else INFO, "%s: not used: %s", candidate.line, candidate.misfit)
        else:
            source = None if candidate.source is None else str(candidate.source)
            what = f"{candidate.what} {candidate.name}".strip()
            yield MethodChoice(candidate.method, source, f"{what} ({candidate.where})", is_found=True)
    yield MethodChoice(DEFAULT_METHOD, None, f"{DEFAULT_METHOD}, because no drafter was found for the target{absent}")


def candidates(target: TargetFiles, download: bool = False) -> Iterator[Candidate]:
    """Yield all candidates for a target, in order of preference.

    ``download``: download a listed drafter that is not on this machine.
    """
    own = _examined(target, target.folder, OWN, lambda spec: spec.comes_with_target)
    if own is not None:
        yield replace(own, name="", source=None, num_bytes=0 if own.misfit else own.num_bytes)
    nearby = list(_nearby(target))
    # By precedence; of two EAGLE heads, the one with its method's default name comes first.
    yield from sorted(nearby, key=lambda each: (-each.precedence, each.source.name not in _own_names(), each.name))  # type: ignore[union-attr]
    known = known_drafters(target)
    for hub_id in known:
        yield _known(target, hub_id, download)
    yield from _family(target, {target.name, *known})


def known_drafters(target: TargetFiles) -> list[str]:
    """Return the public drafters listed for the model that a target's hub id, folder or GGUF file is named after.

    Those with another tokenizer are left out: the user must name them.
    """
    table = tomllib.loads(PAIRS.read_text(encoding="utf-8"))
    folder, file = target.folder.absolute(), gguf.find(target.folder)
    own_names = [_hub_id(folder.parents[1]) if folder.parent.name == "snapshots" else folder.name]
    if file is not None:
        own_names.append(QUANTISATION.sub("", file.name))
    plain_names = {AFFIXES.sub("", name.rpartition("/")[2]).lower() for name in own_names}
    for hub_id, by_method in table.items():
        if hub_id.rpartition("/")[2].lower() in plain_names:
            automatic = [names for method, names in by_method.items() if method != DEFAULT_METHOD_WITH_FOREIGN_DRAFT]
            return [drafter for drafters in automatic for drafter in drafters]
    return []


def local_path(source: str | Path) -> Path | None:
    """Return a file, a local folder, or the folder of a hub id in the download cache; None otherwise."""
    path = expanded(source)
    return path if os.path.isfile(path) else on_this_machine(source)


def target_files(source: object, trusts_code: bool = False) -> TargetFiles | None:
    """Return the files of a folder, hub id or GGUF file, or None if they cannot be read.

    Configs of a hub id that is not in the cache are downloaded, or its GGUF file, because the target itself will be.
    """
    if not isinstance(source, (str, Path)):
        return None
    try:
        name = local_gguf(source)
        if local_path(name) is None:
            fetch_configs(name)
        folder = local_path(name)
        return None if folder is None else TargetFiles.read(str(name), folder, trusts_code)
    except Exception as error:  # reported when the target is loaded
        logger.debug("the target's files cannot be read: %s", first_line(error))
        return None


# --- places -----------------------------------------------------------------------------------------------------------------


def _nearby(target: TargetFiles) -> Iterator[Candidate]:
    """Yield drafts in the target's folder, and neighbouring folders named after the target or a method.

    Heads may be GGUF files in the folder. Next to a target in a GGUF file drafts may also be GGUF files named after a method.
    """
    folder = target.folder.absolute()
    inside = [*_folders(folder), *loose_files(folder), *filter(is_gguf_head, _gguf_files(folder))]
    prefixes = tuple(f"{folder.name.removesuffix('.gguf')}{mark}" for mark in "-_.")
    outside = [each for each in _folders(folder.parent) if each.name.startswith(prefixes) or _says_it_drafts(each)]
    if folder.is_file():
        outside += [each for each in _gguf_files(folder.parent) if _says_it_drafts(each) or is_gguf_head(each)]
    for source, where in [*((each, INSIDE) for each in inside), *((each, NEXT_TO) for each in outside if each != folder)]:
        found = _examined(target, source, where)
        if found is not None:
            yield _sized(found, 1.0 if _says_it_drafts(source) else LARGEST)


def _known(target: TargetFiles, hub_id: str, download: bool) -> Candidate:
    """Return a listed drafter; download it if ``download`` is set."""
    folder, where = on_this_machine(hub_id), f"{KNOWN}, in the download cache"
    found = None if folder is None else _examined(target, folder, where)
    if download and (found is None or found.misfit):  # it is absent, or a download was interrupted
        try:
            found = _examined(target, find_folder(hub_id), where)
        except OutriderError as error:
            return Candidate(hub_id, KNOWN, misfit=str(error))
    if found is None:
        return Candidate(hub_id, KNOWN, misfit="it is not on this machine; --download-draft fetches it", is_absent=True)
    return replace(found, name=hub_id)


def _family(target: TargetFiles, others: set[str]) -> Iterator[Candidate]:
    """Yield smaller models with the target's tokenizer in order of preference.

    They are in the download cache or, for a target in a GGUF file, smaller GGUF files in its folder.
    """
    found, models = [], PROPOSERS.get(DEFAULT_METHOD_WITH_DRAFT).drafts_with
    cached = {_hub_id(each): each for each in _folders(Path(constants.HF_HUB_CACHE)) if each.name.startswith("models--")}
    folders = [(hub_id, on_this_machine(hub_id), FAMILY) for hub_id in cached if hub_id not in others]
    for name, source, where in [*folders, *((str(each), each, SIBLING) for each in _smaller_files(target))]:
        if source is None or source.samefile(target.folder):
            continue
        each = _examined(target, source, where, lambda spec: spec.drafts_with is models)
        if each is not None and not each.is_foreign:
            found.append(_sized(replace(each, name=name), LARGEST, SMALLEST))
    similarity = SequenceMatcher(b=target.name)

    def order(each: Candidate) -> tuple[bool, float, float]:
        similarity.set_seq1(each.name)
        return bool(each.misfit), each.share or 0.0, -similarity.ratio()

    yield from sorted(found, key=order)


def _examined(
    target: TargetFiles,
    source: Path,
    where: str,
    suits: Callable[[MethodSpec], bool] = lambda spec: True,
) -> Candidate | None:
    """Return the candidate of the method with the highest precedence that recognises a folder or file, or None."""
    found: list[Candidate] = []
    for spec in [spec for spec in _methods() if spec.precedence and suits(spec)]:
        each = Candidate(str(source), where, source, spec.name, precedence=spec.precedence)
        try:
            recognised = spec.recognise(source, target)
        except Exception as misfit:  # broken files can raise anything
            found.append(replace(each, misfit=first_line(misfit), is_foreign=isinstance(misfit, DifferentVocabulary)))
            continue
        if recognised is not None:
            found.append(replace(each, what=recognised.what, share=recognised.share, num_bytes=recognised.num_bytes or 0))
    if not found:
        return None
    files = gguf_parts(source) if source.is_file() else weight_files(source)
    best = max(found, key=lambda each: (not each.misfit, each.precedence))
    return replace(best, num_bytes=best.num_bytes or sum(file.stat().st_size for file in files))


def _sized(candidate: Candidate, most: float, least: float = 0.0) -> Candidate:
    """Return the candidate; a draft model that is too large or too small gets a misfit."""
    share = candidate.share
    if share is None or least <= share < most or candidate.misfit:
        return candidate
    wanted = f"less than {most:.0%}" if share >= most else f"at least {least:.1%}"
    return replace(candidate, misfit=f"it has {share:.1%} of the target's weights, expected {wanted}")


# --- methods ----------------------------------------------------------------------------------------------------------------


def _method_for(draft: object, target: TargetFiles | None) -> str:
    """Return the method for a draft given by the user, by the kind of its files."""
    if not isinstance(draft, (str, Path)):
        return DEFAULT_METHOD_WITH_DRAFT
    name = local_gguf(draft)
    source = fetch(str(name)) if is_hub_id(name) else local_path(name)
    found = None if source is None or target is None else _examined(target, source, "")
    if found is not None:
        return found.method
    kind = None if source is None else kind_of(source)  # the target has no folder: a GGUF file, or a model object
    return DEFAULT_METHOD_WITH_DRAFT if kind is None else kind.name


def _methods() -> list[MethodSpec]:
    return [PROPOSERS.get(name) for name in PROPOSERS]


def _own_names() -> set[str]:
    return {spec.own_draft for spec in _methods() if spec.own_draft}


def _says_it_drafts(source: Path) -> bool:
    """Return whether a name starts with the name of a method or of a method's default draft."""
    return source.name.startswith(tuple({spec.name for spec in _methods() if spec.precedence} | _own_names()))


def _hub_id(repository: Path) -> str:
    """Return the hub id of a repository's folder in the download cache."""
    return repository.name.removeprefix("models--").replace("--", "/")


def _smaller_files(target: TargetFiles) -> list[Path]:
    """Return the GGUF files in the folder of a target in a GGUF file that have fewer bytes, and no names of drafts."""
    if not target.folder.is_file():
        return []
    num_bytes = weight_bytes(target.folder)
    whole = [each for each in _gguf_files(target.folder.absolute().parent) if each in weight_files(each)[:1]]  # or first parts
    return [each for each in whole if weight_bytes(each) < num_bytes and not (_says_it_drafts(each) or is_gguf_head(each))]


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError:
        return []
