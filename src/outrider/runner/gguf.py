"""GGUF checkpoints: one file with weights, config and tokenizer. Quantised tensors keep their values, in blocks.

transformers maps the names of tensors and of config entries. Tensors are read one after another, so that loading takes
little more memory than the file's size. Unsupported files are refused before weights are read.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from outrider import native
from outrider.files import expanded
from outrider.memory import weight_files
from outrider.runner import gguf_codes
from outrider.runner.checkpoints.mxfp4 import WEIGHTS
from outrider.runner.checkpoints.weight import dtype_name
from outrider.runner.experts import PackedExperts, pack_experts, sizes_of
from outrider.runner.gguf_architectures import ARCHITECTURES, EXPERT_TENSOR, Array, add_scaling
from outrider.runner.linear import PackedEmbedding, PackedLinear, is_plain_embedding
from outrider.types import OutriderError, first_line, how_to_install

logger = logging.getLogger(__name__)

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FACTORS = "rope_freqs.weight"  # Llama 3's divisors of rotary frequencies: a tensor instead of config entries
# Config entries of every architecture that transformers maps, or that do not affect a supported model.
UNDERSTOOD = (
    r"context_length|embedding_length|block_count|feed_forward_length|vocab_size"
    r"|rope\.(dimension_count|freq_base|scaling\.(type|factor|finetuned|original_context_length|yarn_beta_(fast|slow)))"
    r"|attention\.(head_count|head_count_kv|layer_norm_rms_epsilon|key_length|value_length|causal)"
)
NEEDED = ("block_count", "embedding_length", "attention.head_count")
# Rules for which GPT-2's gives the same tokens: merges learned from single digits never join two of them.
SPLIT_LIKE_GPT2 = ("gpt-2", "smollm")
PART = re.compile(r"-\d{5}-of-\d{5}$")  # end of the name of a split file's part
STRING, LIST = 8, 9  # codes of types in a header


def _quick(reader: Any) -> Any:
    """Return a subclass of gguf.GGUFReader that reads a list of strings as its length and a list of numbers as one array.

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
                return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
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
            return end - orig_offs, [length], [0], [LIST, STRING]

    return Quick


def find(source: object) -> Path | None:
    """Return the GGUF file of a source: the file itself, or the only one in a folder without other weights; otherwise None.

    Raises ``OutriderError`` for a folder with several GGUF files.
    """
    if not isinstance(source, (str, Path)) or not str(source):
        return None
    path = expanded(source)
    files = weight_files(path)
    if not files or files[0].suffix != ".gguf":
        return None
    if len(files) > 1 and not PART.search(files[0].stem):
        raise OutriderError(f"{source} holds {len(files)} GGUF files: name one of them, such as {files[0]}")
    return files[0]


def load_tokenizer(source: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, hub id or GGUF file, as ``AutoTokenizer`` does."""
    path = find(source)
    if path is None or _beside(source, path, "tokenizer.json", "tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    file = GgufFile.open(path)
    file.warn_of_an_unknown_split()
    if file.architecture in ARCHITECTURES:  # not by from_pretrained, which would prefer a tokenizer.json beside the file
        kind: Any = TOKENIZER_MAPPING.get(CONFIG_MAPPING[ARCHITECTURES[file.architecture].model_type], TokenizersBackend)
        return kind(gguf_file=path.name, name_or_path=str(path.parent))  # type: ignore[no-any-return]
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)  # reads the whole header with gguf's own class


def _beside(source: str | Path, file: Path, *names: str) -> bool:
    """Return whether any of these files is next to a GGUF file. They count only if the folder was given."""
    return expanded(source).is_dir() and any((file.parent / name).exists() for name in names)


def load_config(source: str | Path, path: Path) -> PreTrainedConfig:
    """Read a model's config from config.json in the folder ``source``, else from the file.

    Raises ``OutriderError`` for a broken or unsupported file.
    """
    file = GgufFile.open(path)
    file.refuse_unsupported()
    config: PreTrainedConfig = (
        AutoConfig.from_pretrained(path.parent) if _beside(source, path, "config.json") else file.config()
    )
    if file.is_quantized:
        config.quantization_config = {"quant_method": "gguf"}
    return config


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file: a parsed header and memory-mapped tensors."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]  # gguf.gguf_reader.ReaderTensor by name

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Raise ``OutriderError`` if the package gguf is missing, or if the file is truncated, damaged or not a GGUF file."""
        try:
            with path.open("rb") as opened:
                is_gguf, status = opened.read(4) == b"GGUF", path.stat()
        except OSError as error:
            raise OutriderError(f"cannot read {path}: {first_line(error)}") from error
        if not is_gguf:
            raise OutriderError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        return _parsed(path, status.st_ino, status.st_mtime_ns, status.st_size)

    def entry(self, name: str) -> Any:
        """Return an entry of the header; None if it is missing. Raises ``OutriderError`` for a list of strings."""
        num_strings = self.num_strings(name)
        if num_strings is not None:
            raise OutriderError(f"{self.path}: {name} is a list of {num_strings} strings, which is not supported")
        field = self.fields.get(name)
        return None if field is None else field.contents()

    def num_strings(self, name: str) -> int | None:
        """Return the length of a list of strings, whose strings are not read; None if the entry is something else."""
        field = self.fields.get(name)
        return int(field.parts[-1][0]) if field is not None and field.types == [LIST, STRING] else None

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the model's architecture."""
        return str(self.entry("general.architecture"))

    @property
    def is_quantized(self) -> bool:
        """Return whether any tensor is quantised."""
        return any(tensor.tensor_type.name in gguf_codes.FORMATS for tensor in self.tensors.values())

    @property
    def plain_dtype(self) -> torch.dtype:
        """Return the dtype of unquantised tensors: the smallest one present, because norms are float32 in all files."""
        found = {tensor.tensor_type.name for tensor in self.tensors.values()}
        return PLAIN["BF16"] if "BF16" in found else PLAIN["F16"] if "F16" in found else PLAIN["F32"]

    def refuse_unsupported(self) -> None:
        """Raise ``OutriderError`` for a part of a split file, and for an unsupported architecture or type of tensor."""
        if int(self.entry("split.count") or 1) > 1:
            raise OutriderError(f"{self.path} is a part of a split file: merge the parts with llama.cpp's llama-gguf-split")
        if self.architecture not in ARCHITECTURES:
            raise OutriderError(
                f"{self.path} is a model of architecture {self.architecture}: supported in GGUF files are"
                f" {', '.join(ARCHITECTURES)}; other models load from their Hugging Face folder"
            )
        for name, tensor in self.tensors.items():
            kind = tensor.tensor_type.name
            if kind not in PLAIN and kind not in gguf_codes.FORMATS:
                known = ", ".join([*PLAIN, *gguf_codes.FORMATS])
                raise OutriderError(f"{self.path}: tensor {name} is of type {kind}: supported are {known}")

    def refuse_unknown_entries(self) -> None:
        """Raise ``OutriderError`` for an entry that changes the model and that transformers ignores."""
        prefix, architecture = f"{self.architecture}.", ARCHITECTURES[self.architecture]
        understood = re.compile(f"{UNDERSTOOD}|{architecture.entries}")
        advice = "put the model's config.json into the file's folder and pass the folder"
        for name in self.fields:
            if name.startswith(prefix) and not understood.fullmatch(name.removeprefix(prefix)):
                raise OutriderError(f"{self.path}: {name}={self.entry(name)} is not supported: {advice}")
        scaling = self.entry(f"{prefix}rope.scaling.type")
        if scaling not in (None, "none", *architecture.scalings):
            raise OutriderError(f"{self.path}: rope scaling {scaling} is not supported: {advice}")

    def config(self) -> PreTrainedConfig:
        """Return the config that the entries state. Raises ``OutriderError`` for entries that are unknown or implausible."""
        self.refuse_unknown_entries()
        architecture = ARCHITECTURES[self.architecture]

        def entry(name: str) -> Any:
            return self.entry(f"{self.architecture}.{name}")

        for name in NEEDED:
            if not isinstance(entry(name), int) or entry(name) < 1:
                raise OutriderError(
                    f"{self.path}: its header says {self.architecture}.{name}={entry(name)}, expected a positive integer"
                )
        num_layers = entry("block_count")
        if num_layers > len(self.tensors):  # the config makes lists of that length
            raise OutriderError(
                f"{self.path}: its header says block_count={num_layers}, but it has {len(self.tensors)} tensors"
            )
        values: dict[str, Any] = {
            "name_or_path": str(self.path.parent),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "vocab_size": self.num_strings("tokenizer.ggml.tokens"),
        }
        for prefix in ("general", self.architecture, "tokenizer"):
            model_type = architecture.model_type.removesuffix("_text") if prefix == self.architecture else prefix
            names: Mapping[str, str | None] = GGUF_CONFIG_MAPPING.get(model_type, GGUF_CONFIG_MAPPING["qwen3"])  # type: ignore[assignment]
            for name, own in names.items():
                value = self.entry(f"{prefix}.{name}")
                if own is not None and value is not None:
                    values[own] = value
        values.pop("model_type", None)  # llama.cpp's name of the architecture
        # entries that transformers ignores
        values["head_dim"] = entry("attention.key_length") or values.get("head_dim")
        ends = [self.entry(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        known = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        values["eos_token_id"] = known if len(known) > 1 else known[0] if known else None
        try:
            add_scaling(entry, values)
            if architecture.complete is not None:
                architecture.complete(entry, self.tensors, values)
            config: PreTrainedConfig = CONFIG_MAPPING[architecture.model_type].from_dict(
                {name: value for name, value in values.items() if value is not None}
            )
        except Exception as error:  # a header may say anything, and config classes check their values in their own ways
            said = f"lacks {error}" if isinstance(error, KeyError) else f"is not that of a model ({first_line(error)})"
            raise OutriderError(f"{self.path}: its header {said}") from error
        return config

    def _check_parts(self, names: Mapping[str, str]) -> None:
        """Raise ``OutriderError`` unless a parameter has one tensor, or gate and up projection of one type for experts."""
        for own, parts in by_parameter(names).items():
            expected = 2 if EXPERT_TENSOR.fullmatch(parts[0]) and "gate_up_proj" in own else 1
            if len(parts) < expected:
                raise OutriderError(f"{self.path} has {parts[0]} without the other half of {own}")
            if len(parts) > expected:
                raise OutriderError(f"{self.path}: tensors {' and '.join(parts)} are the same parameter {own}")
            kinds = [self.tensors[name].tensor_type.name for name in parts]
            if len({*kinds}) > 1:
                raise OutriderError(
                    f"{self.path}: tensors {' and '.join(parts)} are of types {' and '.join(kinds)}: expected one type for both"
                )

    def warn_of_an_unknown_split(self) -> None:
        """Log a warning if transformers splits text before BPE by GPT-2's rule in place of the one that the file names."""
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        name = self.entry("tokenizer.ggml.pre")
        is_known = name in GGUF_PRE_TOKENIZER_SPLITS or name in SPLIT_LIKE_GPT2
        if self.entry("tokenizer.ggml.model") == "gpt2" and not is_known:
            logger.warning(
                "%s: its tokenizer splits text by the rule %r, which transformers does not know: text is split by GPT-2's"
                " rule and may give other token ids; pass the original model's folder as the tokenizer (--tokenizer)",
                self.path,
                name,
            )

    def known_names(self, model: PreTrainedModel) -> dict[str, str]:
        """Return the names that transformers maps to the model's, for ``Architecture.own_name``."""
        try:
            known: dict[str, str] = get_gguf_hf_weights_map(model, TensorProcessor(), self.architecture)
        except NotImplementedError as error:
            raise OutriderError(f"{self.path} needs a newer version of the package gguf: pip install -U gguf") from error
        return known

    def names(self, model: PreTrainedModel) -> dict[str, str]:
        """Return the model's name of each tensor. Raises ``OutriderError`` if tensors do not match the model."""
        known = self.known_names(model)
        parameters = model.state_dict(keep_vars=True)
        names = {}
        architecture = ARCHITECTURES[self.architecture]
        of_config = (FACTORS, *architecture.config_tensors)
        num_layers, num_mtp = model.config.num_hidden_layers, self.entry(f"{self.architecture}.nextn_predict_layers") or 0
        mtp = tuple(f"blk.{num_layers + index}." for index in range(num_mtp))  # an MTP head is not part of the model
        for name, tensor in self.tensors.items():
            if name in of_config or name.startswith(mtp):
                continue
            own = architecture.own_name(name, known)
            if own not in parameters:
                raise OutriderError(f"{self.path}: unexpected tensor {name} for a {model.config.model_type} model")
            shape, wanted = list(reversed(tensor.shape.tolist())), list(parameters[own].shape)
            expert = EXPERT_TENSOR.fullmatch(name)
            if expert and len(wanted) == 3 and model.get_submodule(own.rpartition(".")[0]).is_transposed:
                wanted[1:] = wanted[:0:-1]
            if expert and expert[2] != "down":
                wanted[1] //= 2
            if [size for size in shape if size > 1] != [size for size in wanted if size > 1]:
                raise OutriderError(f"{self.path}: tensor {name} is {shape}, expected {wanted} by the config")
            names[name] = own
        self._check_parts(names)
        given = {id(parameters[name]) for name in names.values()}
        missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
        if missing:
            raise OutriderError(f"{self.path} lacks {len(missing)} tensors of the model, the first {missing[0]}")
        return names


@lru_cache(maxsize=1)  # parsing takes 0.1 s, and tokenizer, config and weights are read one after another
def _parsed(path: Path, *_version: int) -> GgufFile:
    """See ``GgufFile.open``. ``_version``: numbers that change with the file."""
    try:
        reader_of = import_module("gguf").GGUFReader
    except ImportError as error:
        raise OutriderError(f"{path} needs the package gguf: {how_to_install('gguf')}") from error
    try:
        reader = _quick(reader_of)(path)
        fields = dict(reader.fields)
    except Exception as error:  # broken files fail in more ways than can be listed
        raise OutriderError(f"cannot read {path}: the file is truncated or damaged ({first_line(error)})") from error
    if reader.byte_order != "I":
        raise OutriderError(f"{path} has the byte order of another machine: convert it to this machine's byte order")
    return GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})


def fill(model: PreTrainedModel, path: Path, dtype: torch.dtype | str, device: torch.device) -> None:
    """Load the weights of a file into a model on the meta device, in place.

    With ``dtype="auto"`` on a CPU with Outrider's kernels, quantised linear layers and embeddings become packed ones with the
    values of the file, and the other tensors keep their type. Otherwise every tensor is converted to ``dtype``, "auto" being
    bfloat16 for a quantised file, else the file's own type.
    """
    file = GgufFile.open(path)
    _parsed.cache_clear()  # otherwise the file would stay mapped after loading
    names = file.names(model)
    keeps = dtype == "auto" and native.serves(device)
    if file.is_quantized and not keeps:
        to = torch.bfloat16 if dtype == "auto" else _dtype(dtype)
        why = "dtype was specified" if dtype != "auto" else "quantised weights need a CPU with Outrider's kernels"
        logger.warning("the weights of %s are dequantised to %s: %s", path, dtype_name(to), why)
    else:
        to = file.plain_dtype if dtype == "auto" else _dtype(dtype)
    _fill_buffers(model, file)
    read, places = partial(rows_of, restorer(model.config, file)), _places(model, set(names.values()))
    packed: dict[str, Tensor] = {}
    for own, same in by_parameter(names).items():
        tensors, module = [file.tensors[name] for name in same], model.get_submodule(own.rpartition(".")[0])
        if keeps and _is_packable(module, own) and tensors[0].tensor_type.name in gguf_codes.FORMATS:
            packed[own] = _packed(file, same, read)
            continue
        values = values_of([read(tensor) for tensor in tensors], module)
        parameter = nn.Parameter(values if keeps else values.to(to), requires_grad=False)
        for place in places[own]:
            _set(model, place, parameter)
    for own in packed:  # after the biases, which the packed layers copy
        for place in places[own]:
            _set_packed(model, place.rpartition(".")[0], own, packed)
    _set_orders(model, file, {name: own for name, own in names.items() if own in packed})


def _is_packable(module: nn.Module, parameter: str) -> bool:
    """Return whether a packed layer can replace the module of a parameter."""
    is_expert = sizes_of(module) is not None and parameter.endswith("_proj")
    return is_expert or type(module) is nn.Linear or is_plain_embedding(module)


def _packed(file: GgufFile, names: list[str], read: Callable[..., Tensor]) -> Tensor:
    """Return the packed weight of one parameter, stored in the tensors of these names. Raises ``OutriderError``."""
    tensors = [file.tensors[name] for name in names]
    rows = torch.cat([read(tensor, in_blocks=True) for tensor in tensors], -2)  # of experts the gate comes first
    try:
        return gguf_codes.pack(rows.flatten(0, -2), tensors[0].tensor_type.name)
    except OutriderError as error:
        raise OutriderError(f"{file.path}: tensor {names[0]}: {error}") from error


def _set_packed(model: PreTrainedModel, layer: str, own: str, packed: Mapping[str, Tensor]) -> None:
    """Replace a layer of the model by a packed one. ``own``: the parameter whose packed weight it gets."""
    module = model.get_submodule(layer)
    if isinstance(module, nn.Embedding):
        _set(model, layer, PackedEmbedding(packed[own], module))
    elif isinstance(module, nn.Linear):
        _set(model, layer, PackedLinear(module.weight, module.bias, packed=packed[own]))
    elif not isinstance(module, PackedExperts):  # otherwise both weights are placed already
        given = {name: packed[f"{layer}.{name}"] for name in WEIGHTS if f"{layer}.{name}" in packed}
        _set(model, layer, pack_experts(module, None, given))


def by_parameter(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Group a file's tensors by the model's parameter. Experts have one for the gate, which comes first, and one for up."""
    found: dict[str, list[str]] = {}
    for name, own in sorted(names.items()):
        found.setdefault(own, []).append(name)
    return found


def values_of(parts: list[Tensor], module: Any) -> Tensor:
    """Return a parameter from its tensors: of experts in transformers' layout, else the only one."""
    whole = parts[0]
    if len(parts) == 2:
        whole = torch.cat(parts, 1) if module.is_concatenated else torch.stack(parts, 2).flatten(1, 2)
    return whole.transpose(1, 2).contiguous() if whole.dim() == 3 and getattr(module, "is_transposed", False) else whole


def _set_orders(model: PreTrainedModel, file: GgufFile, packed: Mapping[str, str]) -> None:
    """Tell packed layers the order of their inputs where it is not the model's. ``packed``: the model's names by the file's."""
    for name, own in packed.items():
        order = ARCHITECTURES[file.architecture].input_order(name, model.config)
        if order is not None:
            model.get_submodule(own.removesuffix(".weight")).order = torch.from_numpy(order)


def restorer(config: PreTrainedConfig, file: GgufFile) -> Callable[[Array, str], Array]:
    """Return what undoes llama.cpp's changes of a tensor's rows, such as the order of those of queries and keys."""
    architecture = ARCHITECTURES[file.architecture]
    found: Any = TENSOR_PROCESSORS.get(architecture.changes_like or file.architecture)
    if found is None or architecture.restore is not None:
        return lambda rows, name: rows if architecture.restore is None else architecture.restore(rows, name, config)
    heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
    processor = found(config=heads)
    return lambda rows, name: processor.process(weights=rows, name=name).weights


def _places(model: PreTrainedModel, given: set[str]) -> dict[str, list[str]]:
    """Map each given parameter to the names it fills: its own, and those of tied parameters that are not given."""
    parameters = model.state_dict(keep_vars=True)
    return {
        own: [name for name, same in parameters.items() if name == own or (same is parameters[own] and name not in given)]
        for own in given
    }


def rows_of(restore: Callable[[Array, str], Array], tensor: Any, in_blocks: bool = False) -> Tensor:
    """Return a tensor's values, or the bytes of its blocks, as a copy that does not keep the file mapped."""
    kind, data = tensor.tensor_type.name, tensor.data
    if kind not in PLAIN and not in_blocks:
        data = import_module("gguf").dequantize(data, tensor.tensor_type)
    rows = torch.from_numpy(restore(data, tensor.name).copy())
    return rows.view(torch.bfloat16) if kind == "BF16" else rows  # numpy has no bfloat16: the library returns bytes


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return found


def _set(model: PreTrainedModel, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)


def _fill_buffers(model: PreTrainedModel, file: GgufFile) -> None:
    """Compute the buffers of a model on the meta device: rotary frequencies, and the factors of scaled embeddings."""
    stored = model.state_dict().keys()
    for name, module in list(model.named_modules()):
        buffers = module.named_buffers(name, recurse=False)
        if not any(buffer.is_meta and own not in stored for own, buffer in buffers):
            continue
        if isinstance(module, nn.Embedding):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
            continue
        rotary: Any = type(module)(module.config)
        if FACTORS in file.tensors and rotary.rope_type == "default":
            factors = torch.from_numpy(file.tensors[FACTORS].data.copy()).float()
            if factors.shape != rotary.inv_freq.shape:
                raise OutriderError(
                    f"{file.path}: tensor {FACTORS} is {list(factors.shape)}, expected {list(rotary.inv_freq.shape)}"
                )
            rotary.inv_freq = rotary.inv_freq / factors
        _set(model, name, rotary)
