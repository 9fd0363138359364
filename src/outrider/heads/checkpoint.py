"""Read and write folders of heads: config.json and tensors in any of the usual files.

A path may also name a single weights file; its config is the one in the same folder, except for a GGUF file, which holds both
(``gguf_heads``). Under ``torch.device("meta")`` only file headers are read: tensors have shapes and dtypes, but no values.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import first_line, is_out_of_memory
from outrider.files import expanded, is_path, read_object, replaced, write_whole
from outrider.hub import fetch
from outrider.runner.checkpoint_files import is_finite
from outrider.runner.checkpoints.fp8 import Fp8
from outrider.runner.checkpoints.weight import LayerTensors
from outrider.types import OutriderError, dtype_name
from outrider.weight_files import (
    INDEX_SUFFIX,
    INDEXES,
    LOADED_NAMES,
    MEDUSA_FILES,
    indexed_files,
    weight_files,
    weight_map,
    weights_or_index,
)

if TYPE_CHECKING:
    from transformers import LlamaConfig, Qwen3Config

logger = logging.getLogger(__name__)

Head = TypeVar("Head", bound=nn.Module)
Built = TypeVar("Built")
Result = TypeVar("Result")

SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
ASSISTANT_TENSOR = "pre_projection.weight"  # of Gemma 4's assistants only
LAYER_KEYS = (  # config keys that describe a head's layers, of any architecture
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "hidden_act",
)


class TargetSizes(Protocol):
    """Sizes of a target that a head must fit: from a loaded target or from its files."""

    @property
    def name(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class DraftKind:
    """Type of draft that a folder can contain."""

    name: str  # name of the method that uses it
    what: str  # noun for messages
    tensor_pattern: str  # regular expression for tensor names that occur only in such folders

    def __str__(self) -> str:
        return self.what


MODEL = DraftKind(
    "draft", "a draft model", r"(?<!\d\.)(?<!mtp\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$|^blk\.0\."
)
MEDUSA = DraftKind("medusa", "Medusa heads", r"^(medusa_heads?\.)?(blocks\.0\.layers\.0\.|0\.0\.linear\.)")
EAGLE = DraftKind("eagle", "an EAGLE head", r"^((model|eagle_module|draft_model)\.)?fc\.weight$")
BLOCK = DraftKind(
    "dflash",
    "a block drafter",
    r"^((model|draft_model)\.)?(hidden_norm\.weight|markov_head\.|candidate_selector\.|layers\.[1-9]\d*\.self_attn\.q_norm\.weight)",
)
MTP = DraftKind(
    "mtp",
    "an MTP head",
    rf"^mtp\.|\bmtp_layers\.0\.|\.(eh_proj|enorm|hnorm|shared_head)\.|^{re.escape(ASSISTANT_TENSOR)}$",
)


def find_folder(source: str | Path) -> Path:
    """Return a local folder, or the download of a hub id. Raises ``OutriderError`` if there is none."""
    path = expanded(source)
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix in SUFFIXES):
        return path
    if os.path.exists(path) or is_path(source) or str(source).count("/") != 1:
        raise OutriderError(f"no head at {source}: expected a folder with config.json and weights, or a hub id")
    return fetch(str(source))


def kinds_of(folder: Path) -> list[DraftKind]:
    """Return the kinds of draft in a local folder, by tensor names; empty if unknown."""
    folder = expanded(folder)
    try:
        names = list(tensor_names(folder))
    except Exception:  # broken files are reported when they are loaded
        return []
    kinds = (MEDUSA, BLOCK, EAGLE, MODEL, MTP)  # in order of precedence: heads may store an embedding, and models a head
    if ASSISTANT_TENSOR in names:  # it also has an embedding and layers, like a model
        return [MTP]
    found = [kind for kind in kinds if any(re.search(kind.tensor_pattern, name) for name in names)]
    if BLOCK in found and EAGLE not in found:  # without a projection of features these are layers of any model
        found.remove(BLOCK)
    return [kind for kind in found if kind is not EAGLE or BLOCK not in found]


def kind_of(folder: Path) -> DraftKind | None:
    """Return the first of ``kinds_of``; None if there is none."""
    return next(iter(kinds_of(folder)), None)


def tensor_names(folder: Path) -> Iterator[str]:
    """Yield the names of the tensors in a folder, without reading weights if the format allows it.

    Raises ``OutriderError`` for missing or broken files.
    """
    main = weights_or_index(folder)
    if main is not None and main.endswith(INDEX_SUFFIX):
        yield from weight_map(folder / main)
        return
    for file in _weight_files(folder):
        yield from _readable(file, _names)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, or the header of a GGUF file. Raises ``OutriderError`` if it is missing or not an object."""
    file = _gguf(folder)
    if file is not None:
        from outrider.heads import gguf_heads

        return gguf_heads.read_config(file)
    folder = folder.parent if folder.is_file() else folder
    return read_object(folder / "config.json", f"{folder} is not a head's folder")


def read_folder(folder: Path, prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read config.json and all tensors whose names begin with ``prefix``, on the CPU.

    Raises ``OutriderError`` for missing or broken files, NaN or infinity.
    """
    config = read_config(folder)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder, prefix):
        tensors |= _readable(file, partial(_tensors, prefix=prefix))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise OutriderError(f"{folder}: {name} must be a tensor, got a {type(tensor).__name__}")
        if not tensor.is_meta and not is_finite(tensor):
            raise OutriderError(f"{folder}: the weights of {name} contain NaN or infinity")
    return config, tensors


def _readable(file: Path, read: Callable[[Path], Result]) -> Result:
    """Return what ``read`` finds in a file. Raises ``OutriderError`` if the file is broken."""
    try:
        return read(file)
    except Exception as error:  # truncated files raise many kinds of exceptions
        raise OutriderError(f"cannot read {file}: {first_line(error)}; download or copy it again") from error


def _names(file: Path) -> list[str]:
    if file.suffix == ".gguf":
        from outrider.heads import gguf_heads

        return gguf_heads.names(file)
    if file.suffix != ".safetensors":
        return list(_named(torch.load(file, "cpu", weights_only=True, mmap=True)))
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _tensors(file: Path, prefix: str) -> dict[str, Tensor]:
    if file.suffix == ".gguf":
        from outrider.heads import gguf_heads

        return {name: tensor for name, tensor in gguf_heads.read_tensors(file).items() if name.startswith(prefix)}
    by_header = torch.get_default_device().type == "meta"
    if file.suffix != ".safetensors":
        found = torch.load(file, "meta" if by_header else "cpu", weights_only=True, mmap=by_header or bool(prefix))
        return {name: tensor for name, tensor in _named(found).items() if name.startswith(prefix)}
    with safe_open(file, framework="pt") as opened:
        read = partial(_header, opened) if by_header else opened.get_tensor
        return {name: read(name) for name in opened.keys() if name.startswith(prefix)}  # noqa: SIM118


def _named(found: object) -> dict[str, Any]:
    """Return the content of a file as names and values. Raises ``TypeError`` if it is anything else."""
    if not isinstance(found, dict) or not all([isinstance(name, str) for name in found]):
        raise TypeError(f"it holds a {type(found).__name__} instead of named tensors")
    return found


def _header(opened: Any, name: str) -> Tensor:
    """Return a tensor of an open file without its values."""
    entry = opened.get_slice(name)
    shape = entry.get_shape()
    return torch.empty(shape, dtype=(entry[:0] if shape else opened.get_tensor(name)).dtype, device="meta")


def stored_rates(config: Mapping[str, Any], key: str, depth: int, source: object) -> Any:
    """Return the rates that training stored with a head under "outrider", in ``depth`` nested lists; None without any.

    Raises ``OutriderError`` if they have another form.
    """
    section = config.get("outrider") or {}
    if not isinstance(section, dict):
        raise OutriderError(f'{source}: "outrider" in config.json must be an object, got a {type(section).__name__}')
    values = section.get(key)
    if values is not None and not _are_rates(values, depth):
        form = "a list" if depth == 1 else "lists"
        raise OutriderError(f"{source}: config.json says {key}={values!r}: expected {form} of numbers from 0 to 1")
    return values or None


def _are_rates(value: object, depth: int) -> bool:
    if depth:
        return isinstance(value, list) and all([_are_rates(each, depth - 1) for each in value])
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _weight_files(folder: Path, prefix: str = "") -> list[Path]:
    """Return the files that hold tensors whose names begin with ``prefix``."""
    file = _gguf(folder)
    if file is not None or folder.is_file():
        return [file or folder]
    main = weights_or_index(folder)
    if main is None:
        expected = ", ".join(name for name in LOADED_NAMES if name not in INDEXES)
        raise OutriderError(f"{folder} has no weights: expected one of {expected}")
    names = indexed_files(folder, main, prefix)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise OutriderError(f"{folder} has no {missing[0]}, which its index or config.json names")
    return [folder / name for name in names]


def _gguf(folder: Path) -> Path | None:
    """Return a GGUF file, or the only model in a folder without other weights; otherwise None. See ``runner.gguf.find``."""
    if not any(file.suffix == ".gguf" for file in weight_files(folder)):
        return None
    from outrider.runner import gguf  # which imports transformers

    return gguf.find(folder)


def loose_files(folder: Path) -> list[Path]:
    """Return the weight files in a model's folder that are not part of the model; none if the model's own are missing."""
    try:
        own = set(_weight_files(folder))
    except OutriderError:
        return []
    there = {*folder.glob("*.safetensors"), *(folder / name for name in MEDUSA_FILES if (folder / name).exists())}
    return sorted(there - own)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], **rates: object) -> None:
    """Write a folder for ``read_folder``, with weights in safetensors. ``rates``: those for ``stored_rates``, if not empty."""
    stored = {key: values for key, values in rates.items() if values}
    config = {**config, "outrider": stored} if stored else config
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors)
    for name in INDEXES:  # of an earlier model in the folder
        (folder / name).unlink(missing_ok=True)
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically. Raises OSError like ``named_errors``."""
    with named_errors(file), replaced(file) as unfinished:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, unfinished, {"format": "pt"})


@contextmanager
def named_errors(file: Path) -> Iterator[None]:
    """Raise OSError with the name of a file or folder for the errors of safetensors' and torch's writers."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        problem = "cannot write the file, the disk may be full; with more space the same command resumes"
        raise OSError(errno.EIO, f"{problem} ({first_line(error)})", str(file)) from error


def written_layers(config: LlamaConfig | Qwen3Config) -> dict[str, Any]:
    """Return the entries of config.json that describe a head's layers, as far as all formats agree."""
    rope: Any = config.rope_parameters
    is_scaled = not rope.keys() <= {"rope_theta", "rope_type"}
    keys = [key for key in LAYER_KEYS if not key.startswith("rope_")]
    return {
        **{key: getattr(config, key) for key in ("num_hidden_layers", *keys)},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"} if is_scaled else None,
        "tie_word_embeddings": False,
    }


def check_ids(ids: Tensor | None, vocab_size: int, what: str, whose: str) -> None:
    """Raise ``OutriderError`` if a head's table of token ids, if it has one, contains an id outside a target's vocabulary."""
    if ids is not None and not ids.is_meta:
        odd = next((int(each) for each in (ids.min(), ids.max()) if not 0 <= each < vocab_size), None)
        if odd is not None:
            raise OutriderError(f"{what} contains token {odd}, but {whose} has {vocab_size} tokens")


@dataclass
class HeadFiles:
    """The config and the tensors of a head. Methods raise ``OutriderError`` that names ``source``."""

    source: object  # as the user named it
    folder: Path  # or a single file
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, source: str | Path | HeadFiles) -> HeadFiles:
        """Read a local folder or a hub id, as ``find_folder`` and ``read_folder`` do.

        Files that are read already are copied: loading renames and removes tensors.
        """
        if isinstance(source, HeadFiles):
            return replace(source, tensors=dict(source.tensors))
        return cls.of(source, find_folder(source))

    @classmethod
    def of(cls, source: object, folder: Path, prefix: str = "") -> HeadFiles:
        """Read a local folder's tensors whose names begin with ``prefix``. Those that are stored in FP8 become their values."""
        files = cls(source, folder, *read_folder(folder, prefix))
        files.convert_fp8()
        return files

    def convert_fp8(self) -> None:
        """Replace each matrix in FP8 and its scales with the values they represent."""
        stated, tensors = self.config.get("quantization_config"), self.tensors
        reader = Fp8(stated if isinstance(stated, dict) else {})
        for stem in {name.rpartition(".")[0] for name in tensors if name.endswith(Fp8.marks)}:
            weight = tensors.get(f"{stem}.weight")
            if weight is not None and weight.dtype == torch.float8_e4m3fn and weight.dim() == 2:
                outputs, inputs = weight.shape
                found = {key: tensors.pop(f"{stem}.{key}") for key in Fp8.keys if f"{stem}.{key}" in tensors}
                tensors[f"{stem}.weight"] = reader.read(LayerTensors(stem, outputs, inputs, found))

    def rename(self, named: Callable[[str], str]) -> None:
        """Replace the name of each tensor."""
        self.tensors = {named(name): tensor for name, tensor in self.tensors.items()}

    def integer(self, config: Mapping[str, Any], key: str, minimum: int = 1, default: int | None = None) -> int:
        """Return a number of a part of the config, ``default`` if it is missing. Raise if there is none, or an invalid one."""
        value = config.get(key)
        if not value and default is not None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            expected = f"expected a whole number of at least {minimum}"
            raise OutriderError(f"{self.source}: config.json says {key}={value!r}: {expected}")
        return value

    def check_sections(self, sections: Sequence[str]) -> None:
        """Raise if one of the nested configs exists and is not an object."""
        for key in sections:
            section = self.config.get(key) or {}
            if not isinstance(section, dict):
                raise OutriderError(f"{self.source}: {key} in config.json must be an object, got a {type(section).__name__}")

    def check_speculators(self, kinds: Sequence[str]) -> None:
        """Raise for a head of another kind in speculators' format."""
        kind = self.config.get("speculators_model_type")
        if kind not in (None, *kinds):
            raise OutriderError(f"unsupported speculators head {kind!r} in {self.source}: expected {' or '.join(kinds)}")

    def check_dims(self, dims: Mapping[str, int]) -> None:
        """Raise if a tensor that determines sizes has another number of dimensions. Missing ones pass."""
        for name, num_dims in dims.items():
            if name in self.tensors and self.tensors[name].dim() != num_dims:
                shape = list(self.tensors[name].shape)
                raise OutriderError(f"{self.source}: {name} has shape {shape}, expected {num_dims} dimensions")

    def refuse_quantised(self, integers: Collection[str] = ()) -> None:
        """Raise for a tensor in less than 16 bits or of integers, except those named ``integers``."""
        for name, tensor in self.tensors.items():
            if name not in integers and (not tensor.is_floating_point() or tensor.element_size() < 2):
                raise OutriderError(f"{self.source} is quantised: {name} is {dtype_name(tensor.dtype)}")

    def count_numbered(self, pattern: str) -> int:
        """Return how many numbers from 0 to the highest one there are at the group of a pattern of tensor names."""
        return 1 + max((int(found[1]) for name in self.tensors if (found := re.match(pattern, name)) is not None), default=-1)

    def features(
        self, hidden_size: int, stated: tuple[Any, Any], default: Callable[[], tuple[int, ...]]
    ) -> tuple[int, tuple[int, ...]]:
        """Return the width of the target's features, by default the head's, and the hidden states that ``fc`` reads.

        ``stated``: these in transformers' numbering, or the layers, counted from 0, whose outputs they are; if the config names
        neither, they are ``default()``, with a warning. Raise for ids that are not integers, and if ``fc`` does not read all.
        """
        states, layers = stated
        width, named = self.integer(self.config, "target_hidden_size", default=hidden_size), states or layers
        if not named:
            ids = default()
            logger.warning("%s does not name the hidden states it reads: assuming %s", self.source, ids)
        elif not isinstance(named, (list, tuple)) or not all([type(index) is int for index in named]):
            raise OutriderError(f"{self.source}: invalid layer ids {named!r} in config.json: expected a list of integers")
        else:
            ids = tuple(named) if states else tuple([index + 1 for index in named])
        shape = list(self.tensors["fc.weight"].shape)
        if shape[-1] != len(ids) * width:
            inputs = f"{len(ids) * width} inputs: its config names the hidden states {ids} of {width}"
            raise OutriderError(f"{self.source}: fc.weight has shape {shape}, expected {inputs}")
        return width, ids

    def draft_size(self, stated: int, vocab_size: int) -> int:
        """Return the number of tokens that a head can draft: those in ``d2t``, else ``stated``.

        Raise for a ``d2t`` that is no vector or that the target's own output head does not fit, or if it is missing and the
        target has more tokens.
        """
        offsets = self.tensors.get("d2t")
        if offsets is None:
            if stated < vocab_size:
                raise OutriderError(f"{self.source} drafts {stated} of {vocab_size} tokens, but the mapping d2t is missing")
            return stated
        self.check_dims({"d2t": 1})
        if len(offsets) != vocab_size and "lm_head.weight" not in self.tensors:
            raise OutriderError(f"{self.source} drafts {len(offsets)} of {vocab_size} tokens, but lm_head.weight is missing")
        return len(offsets)

    def offsets_to_ids(self) -> None:
        """Replace ``d2t``, if it exists, the offset from each draft id to its target id, with ``draft_ids``."""
        offsets = self.tensors.pop("d2t", None)
        if offsets is not None:
            self.tensors["draft_ids"] = offsets.long() + torch.arange(len(offsets))

    def build(self, make: Callable[[], Built], problem: str = "cannot build a head from its config") -> Built:
        """Return what ``make`` builds from the config. Raise if that fails."""
        try:
            return make()
        except OutriderError:
            raise
        except KeyError as error:  # from transformers' tables
            raise OutriderError(f"{self.source}: unknown activation or rotary type {error} in config.json") from error
        except Exception as error:  # invalid values raise many kinds of exceptions
            raise OutriderError(f"{self.source}: {problem}: {first_line(error)}") from error

    def fill(self, head: Head, ignored: Sequence[str] = (), named: Callable[[str], str] = str) -> Head:
        """Load every parameter and persistent buffer of a head; return it in evaluation mode, without gradients.

        ``ignored``: patterns of names that may be unused; ``named``: a tensor's name in the checkpoint, for messages. Raise
        with the first tensor that is missing, unknown or of another shape.
        """
        source, tensors, wanted = self.source, self.tensors, head.state_dict()
        missing = [name for name in wanted if name not in tensors]
        if missing:
            raise OutriderError(f"{source} lacks {len(missing)} of the head's tensors, the first {named(missing[0])}")
        unknown = [name for name in tensors if name not in wanted and not any(re.search(each, name) for each in ignored)]
        if unknown:
            raise OutriderError(
                f"{source} has tensors that this kind of head does not have: {len(unknown)}, the first {named(unknown[0])}"
            )
        for name, there in wanted.items():
            own, shape = list(tensors[name].shape), list(there.shape)
            if own != shape:
                raise OutriderError(f"{source}: {named(name)} has shape {own}, expected {shape} from its config")
        with torch.no_grad():
            for name, there in wanted.items():  # not all at once: converted copies would take as much memory as the head
                there.copy_(tensors[name])
        return head.eval().requires_grad_(False)
