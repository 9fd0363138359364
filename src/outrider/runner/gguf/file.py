"""GGUF files: their headers, the configs that these state, and the names of their tensors."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from outrider.errors import errors_as, first_line, requires
from outrider.runner.gguf import codes
from outrider.runner.gguf.architecture import EXPERT_TENSOR, FACTORS, Architecture, Array
from outrider.runner.gguf.architectures import ARCHITECTURES
from outrider.runner.gguf.configs import add_positions, check_router, required
from outrider.types import OutriderError
from outrider.weight_files import gguf_parts

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Entries of every architecture that do not affect a supported model, or only together with others.
IGNORED_ENTRIES = (
    r"context_length|embedding_length|block_count|feed_forward_length|vocab_size|nextn_predict_layers"
    r"|rope\.(dimension_count(_swa)?|freq_base|scaling\.(type|factor|finetuned|original_context_length|yarn_beta_(fast|slow)))"
    r"|attention\.(head_count|head_count_kv|layer_norm_rms_epsilon|(key|value)_length(_swa)?|causal)"
)
HEAD_DIM_ENTRIES = ("rope.dimension_count", "attention.value_length")  # unless the architecture reads them
DRAFT_HEAD_ENTRIES = ("target_layers", "embedding_length_out")  # entries about the target of a head
REQUIRED_SIZES = ("block_count", "embedding_length", "attention.head_count")
SEPARATE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")  # llama.cpp's name until April 2024
STRING, LIST = 8, 9  # codes of types in a header
TOKENS = "tokenizer.ggml.tokens"
LEARNED = (1, 6)  # types of tokens: normal ones and bytes
# Tokens at which a text or a turn ends. Most headers name only one of them, so llama.cpp finds the others by name, too
# (llama-vocab.cpp). Its tokens that end the middle of a file are left out: the models' own configs do not name them.
END_OF_GENERATION_TOKENS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
# In models with these, <|end|> ends a part of a turn.
OF_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def _quick(reader: Any) -> Any:
    """Return a subclass of gguf.GGUFReader that reads a list of strings as its length and bytes, one of numbers as an array.

    gguf's own class reads the lists of a vocabulary of 150,000 in 7 s. Entries beyond the end of the file raise ``ValueError``:
    otherwise a damaged length such as 2^60 takes hours.
    """

    class Quick(reader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("an entry of its header goes beyond the end")
            return super()._get(offset, dtype, count, *more, **options)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[int]]:
            if raw_type != LIST or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = self._get(orig_offs, np.uint32)[0], self._get(orig_offs + 4, np.uint64)
            start = end = orig_offs + 12
            if kind == LIST:
                raise ValueError("a list of lists, which is not supported")
            if kind != STRING:
                numbers = self._get(start, self.gguf_scalar_to_np[kind], length[0])
                return 12 + numbers.nbytes, [numbers], [0], [LIST, kind]
            self._get(start, np.uint64, length[0])  # each string begins with its length
            raw = memoryview(self.data)
            for _ in range(length[0]):
                end += 8 + int.from_bytes(raw[end : end + 8], sys.byteorder)
                if end > len(raw):
                    raise ValueError("an entry of its header goes beyond the end")
            return end - orig_offs, [length, self.data[start:end]], [0], [LIST, STRING]

    return Quick


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file. ``factors`` float32 multiply the values of the type NVFP4: one, or one for each expert."""

    name: str
    tensor_type: Any  # gguf.GGMLQuantizationType
    shape: list[int]
    data: Array  # values; of BF16 and of quantised types the bytes of each row
    factors: Array | None = None


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file: a parsed header and memory-mapped tensors."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]
    head: Architecture | None = None  # if the file is not of a model, but of a head (see heads/gguf_heads.py)

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Raise ``OutriderError`` if the package gguf is missing, or if the file is truncated, damaged or not a GGUF file."""
        parts = gguf_parts(path)
        try:
            with path.open("rb") as opened:
                is_gguf = opened.read(4) == b"GGUF"
            versions = [part.stat() for part in parts]
        except OSError as error:
            raise OutriderError(f"cannot read {path}: {first_line(error)}") from error
        if not is_gguf:
            raise OutriderError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        return _parsed(tuple(parts), *(number for each in versions for number in (each.st_ino, each.st_mtime_ns, each.st_size)))

    def entry(self, name: str) -> Any:
        """Return an entry of the header, or None. Raises ``OutriderError`` for a list of strings and for broken text."""
        num_strings = self.num_strings(name)
        if num_strings is not None:
            raise OutriderError(f"{self.path}: {name} is a list of {num_strings} strings, which is not supported")
        field = self.fields.get(name)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise OutriderError(f"cannot read {self.path}: the text of {name} is damaged ({error})") from error

    def num_strings(self, name: str) -> int | None:
        """Return the length of a list of strings; None if the entry is something else."""
        field = self.fields.get(name)
        return int(field.parts[-2][0]) if field is not None and field.types == [LIST, STRING] else None

    def strings(self, name: str) -> list[str]:
        """Return a list of strings; an empty one if there is no such list."""
        count, at, found = self.num_strings(name) or 0, 0, []
        raw = memoryview(self.fields[name].parts[-1] if count else b"")
        for _ in range(count):
            end = at + 8 + int.from_bytes(raw[at : at + 8], "little")
            found.append(str(raw[at + 8 : end], errors="replace"))
            at = end
        return found

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, in the order of its ids."""
        return self.strings(TOKENS)

    def vocabulary(self) -> tuple[dict[str, int], set[str]]:
        """Return the id of each token, and the tokens that training did not learn: special, added and padding ones."""
        tokens = self.tokens
        kinds = self.entry("tokenizer.ggml.token_type") or [LEARNED[0]] * len(tokens)
        added = {token for token, kind in zip(tokens, kinds, strict=False) if kind not in LEARNED}
        return {token: index for index, token in enumerate(tokens)}, added

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the model's architecture."""
        return str(self.entry("general.architecture"))

    def model_entry(self, name: str) -> Any:
        """Return an entry of the model, whose name is given without the architecture; see ``entry``."""
        return self.entry(f"{self.architecture}.{name}")

    @cached_property
    def record(self) -> Architecture:
        """Return the record of the architecture, which is supported (see ``refuse_unsupported``)."""
        if self.head is not None:
            return self.head
        record = ARCHITECTURES[self.architecture]
        return record.variant(self.model_entry, self.tensors) or record

    @property
    def is_quantized(self) -> bool:
        """Return whether any tensor is quantised."""
        return any(tensor.tensor_type.name in codes.FORMATS for tensor in self.tensors.values())

    def num_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the memory of the weights in bytes, converted to ``dtype``; None: as they are, quantised ones in blocks."""
        if dtype is not None:
            return sum(prod(tensor.shape) for tensor in self.tensors.values()) * dtype.itemsize
        bits = 0.0
        for name, tensor in self.tensors.items():
            kind = tensor.tensor_type.name
            per_weight = 8 * PLAIN[kind].itemsize if kind in PLAIN else codes.FORMATS[kind].memory
            per_weight += tensor.factors is not None  # a float32 scale instead of 16 bits, for 16 weights
            bits += prod(tensor.shape) * (32 if self.record.is_decoded(name) else per_weight)
        return round(bits / 8)

    @property
    def plain_dtype(self) -> torch.dtype:
        """Return the dtype of unquantised tensors: the smallest one present, because norms are float32 in all files."""
        found = {tensor.tensor_type.name for tensor in self.tensors.values()}
        return PLAIN["BF16"] if "BF16" in found else PLAIN["F16"] if "F16" in found else PLAIN["F32"]

    def refuse_unsupported(self) -> None:
        """Raise ``OutriderError`` for an unsupported architecture or type of tensor."""
        if any(self.model_entry(name) is not None for name in DRAFT_HEAD_ENTRIES):
            raise OutriderError(f"{self.path} drafts for another model ({self.architecture}): give it as the draft")
        if self.architecture not in ARCHITECTURES:
            raise OutriderError(
                f"{self.path} is a model of architecture {self.architecture}: supported in GGUF files are"
                f" {', '.join(ARCHITECTURES)}; other models load from their Hugging Face folder"
            )
        self.refuse_unsupported_types(self.tensors)

    def refuse_unsupported_types(self, names: Iterable[str]) -> None:
        """Raise ``OutriderError`` if one of these tensors is of an unsupported type."""
        for name in names:
            kind = self.tensors[name].tensor_type.name
            if kind not in PLAIN and kind not in codes.FORMATS:
                known = ", ".join([*PLAIN, *codes.FORMATS])
                raise OutriderError(f"{self.path}: tensor {name} is of type {kind}: supported are {known}")

    def refuse_unknown_entries(self, read: Collection[str]) -> None:
        """Raise ``OutriderError`` for an entry that may change the model and is not among those ``read``."""
        understood = re.compile(f"{IGNORED_ENTRIES}|{self.record.ignored}")
        advice = "put the model's config.json into the file's folder and pass the folder"
        if self.head is not None:
            advice = "draft with the folder that the file was converted from"
        for field in self.fields:
            architecture, _, name = field.partition(".")
            if architecture == self.architecture and name not in read and not understood.fullmatch(name):
                raise OutriderError(f"{self.path}: {field}={self.entry(field)} is not supported: {advice}")
        scaling = self.model_entry("rope.scaling.type")
        is_scaled = scaling not in (None, "none")
        if is_scaled and scaling not in self.record.scalings:
            raise OutriderError(f"{self.path}: rope scaling {scaling} is not supported: {advice}")
        if is_scaled and FACTORS in self.tensors:
            raise OutriderError(
                f"{self.path}: rope scaling {scaling} together with the tensor {FACTORS} is not supported: {advice}"
            )
        head_dim = self.model_entry("attention.key_length")
        head_dim = head_dim or self.model_entry("embedding_length") // self.model_entry("attention.head_count")
        for name in HEAD_DIM_ENTRIES:
            value = self.model_entry(name)
            if name not in read and value not in (None, head_dim):
                problem = f"{self.architecture}.{name}={value} is not supported, expected {head_dim}, the size of a head"
                raise OutriderError(f"{self.path}: {problem}: {advice}")

    def config(self) -> PreTrainedConfig:
        """Return the config that the entries state. Raises ``OutriderError`` for entries that are unknown or implausible."""
        architecture, read = self.record, set()

        def entry(name: str) -> Any:
            read.add(name)
            return self.model_entry(name)

        self._check_sizes()
        values: dict[str, Any] = {
            "name_or_path": str(self.path),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "vocab_size": self.num_strings(TOKENS),
        }
        for prefix in ("general", self.architecture, "tokenizer"):
            model_type = architecture.model_type.removesuffix("_text") if prefix == self.architecture else prefix
            names: Mapping[str, str | None] = GGUF_CONFIG_MAPPING.get(model_type, GGUF_CONFIG_MAPPING["qwen3"])  # type: ignore[assignment]
            for name, own in names.items():
                if own is not None:
                    value = entry(name) if prefix == self.architecture else self.entry(f"{prefix}.{name}")
                    values |= {} if value is None else {own: value}
        read.difference_update(HEAD_DIM_ENTRIES)
        values.pop("model_type", None)  # llama.cpp's name of the architecture
        values["num_hidden_layers"] = entry("block_count") - self.num_mtp_layers
        # entries that transformers ignores
        values["head_dim"] = entry("attention.key_length") or values.get("head_dim")
        ends = self._ends()
        values["eos_token_id"] = ends if len(ends) > 1 else ends[0] if ends else None
        values |= {name: tensor in self.tensors for name, tensor in architecture.flags.items()}
        try:
            add_positions(entry, values, architecture.theta)
            if architecture.router is not None:
                check_router(entry, architecture.router)
            values |= {own: required(entry, name) for own, name in architecture.entries.items()}
            values |= {own: entry(name) or default for own, (name, default) in architecture.defaults.items()}
            values |= architecture.constants
            if architecture.complete is not None:
                architecture.complete(entry, self.tensors, values)
            given = {name: value for name, value in values.items() if value is not None}
            given = dict.fromkeys((*architecture.none_if_missing, "eos_token_id")) | given
            config: PreTrainedConfig = CONFIG_MAPPING[architecture.model_type].from_dict(given)
        except Exception as error:  # a header may say anything, and config classes check their values in their own ways
            problem = f"lacks {error}" if isinstance(error, KeyError) else f"is not that of a model ({first_line(error)})"
            raise OutriderError(f"{self.path}: its header {problem}") from error
        self.refuse_unknown_entries(read)
        return config

    def _ends(self) -> list[int]:
        """Return the tokens at which a text or a turn ends: those that the header names, then those of these names."""
        named = [self.entry(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        also = self.entry("tokenizer.ggml.eos_token_ids") or ()  # ollama's
        by_name = {token: index for index, token in enumerate(self.tokens) if token in END_OF_GENERATION_TOKENS}
        if any(by_name.keys() >= each for each in OF_CHANNELS):
            by_name.pop("<|end|>", None)
        return list(dict.fromkeys(token_id for token_id in (*named, *also, *by_name.values()) if token_id is not None))

    def _check_sizes(self) -> None:
        """Raise ``OutriderError`` unless the numbers that every model has are plausible."""
        for name in REQUIRED_SIZES:
            value = self.model_entry(name)
            if not isinstance(value, int) or value < 1:
                raise OutriderError(
                    f"{self.path}: its header says {self.architecture}.{name}={value}, expected a positive integer"
                )
        num_layers, num_mtp = self.model_entry("block_count"), self.num_mtp_layers
        if num_layers > len(self.tensors):  # the config makes lists of that length
            raise OutriderError(
                f"{self.path}: its header says block_count={num_layers}, but it has {len(self.tensors)} tensors"
            )
        if not isinstance(num_mtp, int) or not 0 <= num_mtp < num_layers:
            raise OutriderError(
                f"{self.path}: its header says nextn_predict_layers={num_mtp}, expected a number below block_count={num_layers}"
            )

    @property
    def num_mtp_layers(self) -> int:
        """Return the number of layers after the model's own, which are an MTP head."""
        return 0 if self.head else self.model_entry("nextn_predict_layers") or 0

    def _check_parts(self, names: Mapping[str, str]) -> None:
        """Raise ``OutriderError`` unless every parameter has its one tensor, or its two halves; experts' are of one type."""
        record = self.record
        for parameter, parts in tensors_by_parameter(names).items():
            expected = 2 if record.is_half(parts[0]) else 1
            if len(parts) < expected:
                raise OutriderError(f"{self.path} has {parts[0]} without the other half of {parameter}")
            if len(parts) > expected:
                raise OutriderError(f"{self.path}: tensors {' and '.join(parts)} are the same parameter {parameter}")
            kinds = [self.tensors[name].tensor_type.name for name in parts]
            if len({*kinds}) > 1 and EXPERT_TENSOR.fullmatch(parts[0]):
                raise OutriderError(
                    f"{self.path}: tensors {' and '.join(parts)} are of types {' and '.join(kinds)}: expected one type for both"
                )

    def known_names(self, model: PreTrainedModel) -> dict[str, str]:
        """Return the names that transformers maps to the model's, for ``Architecture.own_name``."""
        package: Any = import_module("gguf")
        make = package.get_tensor_name_map
        package.get_tensor_name_map = cache(make)  # transformers makes the same one for every module, in seconds
        try:
            known: dict[str, str] = get_gguf_hf_weights_map(model, TensorProcessor(), self.architecture)
        except NotImplementedError as error:
            raise OutriderError(f"{self.path} needs a newer version of the package gguf: pip install -U gguf") from error
        finally:
            package.get_tensor_name_map = make
        return known

    def names(self, model: PreTrainedModel) -> dict[str, str]:
        """Return the model's name of each tensor. Raises ``OutriderError`` if tensors do not match the model."""
        known = self.known_names(model)
        parameters = model.state_dict(keep_vars=True)
        names = {}
        architecture = self.record
        of_config, num_layers = (FACTORS, *architecture.config_tensors), model.config.num_hidden_layers
        mtp = tuple(f"blk.{num_layers + index}." for index in range(self.num_mtp_layers))  # not part of the model
        for name, tensor in self.tensors.items():
            if name in of_config or name.startswith(mtp) or architecture.is_unused(name, model.config):
                continue
            parameter = architecture.own_name(name, known)
            if SEPARATE_EXPERT.fullmatch(name):
                raise OutriderError(f"{self.path} is an old file with separate experts ({name}): take a newer conversion")
            if parameter not in parameters:
                raise OutriderError(f"{self.path}: unexpected tensor {name} for a {model.config.model_type} model")
            shape = tensor.shape
            wanted = architecture.shape_of(name, model.config) or self._shape_of(name, parameter, model)
            if len(wanted) == 1:  # Mamba 2's norm is stored in groups
                shape = [prod(shape)]
            if [size for size in shape if size > 1] != [size for size in wanted if size > 1]:
                raise OutriderError(f"{self.path}: tensor {name} is {shape}, expected {wanted} by the config")
            names[name] = parameter
        self._check_parts(names)
        given = {id(parameters[name]) for name in names.values()}
        missing = [name for name, value in parameters.items() if id(value) not in given]
        if missing:
            raise OutriderError(f"{self.path} lacks {len(missing)} of the model's tensors, the first {missing[0]}")
        return names

    def _shape_of(self, name: str, parameter: str, model: PreTrainedModel) -> list[int]:
        """Return the shape of the tensor that is a parameter, or half of its rows."""
        layer, _, attribute = parameter.rpartition(".")
        module = model.get_submodule(layer)
        wanted = list(getattr(module, attribute).shape)
        if EXPERT_TENSOR.fullmatch(name) and len(wanted) == 3 and module.is_transposed:
            wanted[1:] = wanted[:0:-1]
        if self.record.is_half(name):
            wanted[1 if EXPERT_TENSOR.fullmatch(name) else 0] //= 2
        return wanted


# Parsing takes 0.1 s; tokenizer, config and weights are read one after another, and a target is compared with its draft.
@lru_cache(maxsize=2)
def _parsed(paths: tuple[Path, ...], *_version: int) -> GgufFile:
    """See ``GgufFile.open``. ``paths``: the file's parts in order. ``_version``: numbers that change with the files."""
    readers = [_read(path) for path in paths]
    tensors = {
        each.name: FileTensor(each.name, each.tensor_type, each.shape.tolist()[::-1], each.data)
        for reader in readers
        for each in reader.tensors
    }
    file = GgufFile(paths[0], dict(readers[0].fields), tensors)
    record = ARCHITECTURES.get(file.architecture)
    for name in record.stacked if record else ():
        if name in tensors:
            tensors |= _unstacked(tensors.pop(name))
    for name in record.layer_entries if record else ():
        tensors |= _per_layer(file, name)
    for name in [name for name, tensor in tensors.items() if tensor.tensor_type.name == "NVFP4"]:
        tensors[name] = _scaled(paths[0], tensors, name, record)
    count = file.entry("split.count") or 1
    if count != len(paths):
        raise OutriderError(
            f"{file.path}: its header says split.count={count}, but of its parts its folder holds {len(paths)}: put all parts"
            " there, under the names that llama-gguf-split gives them"
        )
    return file


def _unstacked(tensor: FileTensor) -> dict[str, FileTensor]:
    """Return the tensors of which one consists. See ``Architecture.stacked``."""
    names = [f"{tensor.name.removesuffix('weight')}{index}.weight" for index in range(len(tensor.data))]
    parts = zip(names, tensor.data, strict=True)
    return {name: replace(tensor, name=name, shape=tensor.shape[1:], data=data) for name, data in parts}


def _per_layer(file: GgufFile, name: str) -> dict[str, FileTensor]:
    """Return an entry of the header as tensors. See ``Architecture.layer_entries``. Raises ``OutriderError``."""
    value, num_layers = file.entry(name), file.model_entry("block_count")
    if not isinstance(num_layers, int) or not 0 < num_layers <= len(file.tensors) or value is None:
        return {}  # refused later, as a wrong number or a missing tensor
    numbers = np.array(value, np.float32).reshape(-1)
    if len(numbers) not in (1, num_layers):
        raise OutriderError(f"{file.path}: its header says {name} for {len(numbers)} layers, expected {num_layers}")
    kind = import_module("gguf").GGMLQuantizationType.F32
    each = np.broadcast_to(numbers, num_layers)[:, None]
    return {f"blk.{at}.{name}": FileTensor(f"blk.{at}.{name}", kind, [1], each[at]) for at in range(num_layers)}


def _scaled(path: Path, tensors: dict[str, FileTensor], name: str, record: Architecture | None) -> FileTensor:
    """Return a tensor of the type NVFP4, with its factors if the file has any, and remove these and those of its inputs.

    Raises ``OutriderError`` for factors of another type, size or value.
    """
    tensor, stem = tensors[name], name.removesuffix(".weight")
    tensors.pop(f"{stem}.input_scale", None)  # for activations in 4 bits
    if f"{stem}.scale" not in tensors or (record and record.own_name(f"{stem}.scale", {})):
        return tensor
    scale = tensors.pop(f"{stem}.scale")
    wanted = {1, *tensor.shape[:-2]}
    if scale.tensor_type.name != "F32" or scale.data.size not in wanted or not np.isfinite(scale.data).all():
        raise OutriderError(f"{path}: tensor {scale.name} is not {' or '.join(map(str, sorted(wanted)))} float32 numbers")
    return replace(tensor, factors=scale.data.copy().reshape(-1))


def _read(path: Path) -> Any:
    """Return an open gguf.GGUFReader. Raises ``OutriderError``."""
    with errors_as(f"cannot read {path}", ImportError), requires("gguf", str(path)):
        reader_of = import_module("gguf").GGUFReader
    try:
        reader = _quick(reader_of)(path)
    except Exception as error:  # broken files fail in more ways than can be listed
        raise OutriderError(f"cannot read {path}: the file is truncated or damaged ({first_line(error)})") from error
    if reader.byte_order != "I":
        raise OutriderError(f"{path} has the byte order of another machine: convert it to this machine's byte order")
    return reader


def tensors_by_parameter(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Group a file's tensors by the model's parameter. Where there are two, those of the first rows come first."""
    found: dict[str, list[str]] = {}
    for name, parameter in sorted(names.items()):
        found.setdefault(parameter, []).append(name)
    return found


def close_cached_files() -> None:
    """Drop the cached readers, so that no file stays memory-mapped."""
    _parsed.cache_clear()
