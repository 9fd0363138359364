"""Build a checkpoint that computes the same function as a small Llama-shaped model at the cost of a large one.

Output and acceptance are the small model's; the time of a pass is a 1B or 8B model's; every engine that reads Hugging Face
folders loads the result. Construction:

- The hidden state is padded with zeros. RMSNorm then averages over H instead of h values, so its weights are scaled by
  sqrt(h/H) and its epsilon by h/H: exact in bfloat16 where H/h is a power of four. Where it is twice a power of four, every
  real feature is stored twice (the second copy has norm weight 0 and is never read), which restores that ratio.
- In a real layer, the value projections of extra heads and the up projections of extra feed-forward rows are zero on the real
  features, so that the random columns of the output projections that read them add exactly zero. (The columns of extra query
  heads that share a real value head are zero instead.)
- Extra layers are spread evenly between the real ones. Their norms are zero on the real features, and the hidden state is zero
  elsewhere, so that their output is exactly zero whatever their random matrices hold.
- All other new weights are random at the scale of a trained model's. No two tensors are equal, and at 1B fewer than 5 of 100
  weights are zero: an engine that stores equal constants once would otherwise read a part of the model from its cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from outrider import hub
from outrider.bench.shapes import Shape, count_params, num_params, shape_for
from outrider.bench.widening import Inflater, Noise
from outrider.disk_cache import lasting_dir
from outrider.files import not_a_model_folder
from outrider.heads.checkpoint import read_config, read_folder
from outrider.memory import require_disk
from outrider.memory import size as in_bytes
from outrider.progress import shown
from outrider.types import OutriderError
from outrider.weight_files import weight_files

logger = logging.getLogger(__name__)

FORMAT = 4  # part of the cache key: increment it when the same source and size give other weights
SHARD_BYTES = 1 << 29
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # same tensor names, same residual structure


def _read_source(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not (source / "config.json").is_file():
        raise OutriderError(not_a_model_folder(source))
    config = read_config(source)
    if config.get("model_type") not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise OutriderError(f"cannot inflate a {config.get('model_type')} model: expected a Llama-shaped one ({known})")
    kinds = config.get("layer_types")
    is_mixed = len(set(kinds)) > 1 if kinds else bool(config.get("use_sliding_window"))
    if is_mixed:
        raise OutriderError(f"cannot inflate {source}: some layers may have a sliding window; expected layers of one type")
    _, weights = read_folder(source)
    narrow = next((name for name, weight in weights.items() if not weight.is_floating_point() or weight.itemsize < 2), None)
    if narrow is not None or config.get("quantization_config"):
        why = "quantization_config in its config" if narrow is None else f"{narrow} is {weights[narrow].dtype}"
        raise OutriderError(f"cannot inflate {source}: it is quantised ({why}); expected weights in 16 or 32 bits")
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    return config, weights


def inflate(
    source: str | Path,
    out: str | Path,
    size: str | Shape = "1b",
    *,
    seed: int = 0,
    context: int | None = None,
) -> Path:
    """Write ``source`` inflated to ``size`` (a name or a ``Shape``) to the new folder ``out``.

    ``context``: the context length in tokens that its config declares, to time longer prompts than the source was trained on;
    None: the source's. The folder appears only when it is complete. Raises ``OutriderError`` if ``out`` exists, the source is
    not a Llama-shaped folder, the shape cannot hold it or the disk is too small.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise OutriderError(f"{out} already exists: delete it or give another folder")
    config, weights = _read_source(source)
    large = shape_for(config, num_params(size)) if isinstance(size, str) else size
    dtype = weights["model.embed_tokens.weight"].dtype
    inflater = Inflater(config, large, Noise(dtype, seed), dtype)
    if context is not None:
        config = {**config, "max_position_embeddings": context}
    with new_folder(out) as part:
        total = count_params(config, large)
        needed = round(1.02 * total * dtype.itemsize)  # 2% for the tokenizer and the file system
        advice = "choose a smaller size, or a folder on another disk (OUTRIDER_CACHE, unless you named one)"
        require_disk(out.parent, needed, "the inflated model takes", advice)
        logger.info("writing the inflated model to %s: %s", out, in_bytes(needed))
        _copy_tokenizer(source, part)
        written = _write_shards(inflater.tensors(weights), part, total)
        _write_config(part, config, inflater, written, seed)
    return out


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out`` on success and is deleted on failure, raised as ``OutriderError``."""
    part = out.with_name(f"{out.name}.part-{secrets.token_hex(8)}")  # process ids are the same in two containers
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(out)
    except OSError as error:
        path = Path(error.filename or part)
        is_input = path.exists() and not path.is_relative_to(part)
        what = f"cannot read {path}" if is_input else f"cannot write {out}"
        raise OutriderError(f"{what}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy_tokenizer(source: Path, out: Path) -> None:
    keep = ("token", "vocab", "merges", "special", "added", "chat_template", "generation_config", "spiece")
    for file in source.iterdir():
        if file.is_file() and file.name.startswith(keep):
            shutil.copyfile(file, out / file.name)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], out: Path, total: int) -> int:
    """Writes shards of at most half a gigabyte, so that memory stays low. Returns the number of parameters."""
    index: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    written = shards = size = 0

    def flush() -> None:
        nonlocal shard, shards
        shards += 1
        save_file(shard, out / f"{shards}.safetensors", metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, shards))
        shard = {}

    with shown(f"building a {total / 1e9:.2f}B checkpoint") as report:
        for name, tensor in tensors:
            if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
                flush()
            shard[name] = tensor.contiguous()
            written, size = written + tensor.numel(), size + tensor.nbytes
            report(written / total, 1.0, "")
        flush()
    names = {i: f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)}
    for i, name in names.items():
        (out / f"{i}.safetensors").rename(out / name)
    weight_map = {name: names[i] for name, i in index.items()}
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size, "total_parameters": written}, "weight_map": weight_map}, indent=1)
    )
    return written


def _write_config(out: Path, config: Mapping[str, Any], inflater: Inflater, params: int, seed: int) -> None:
    layers = inflater.large.layers
    new = {
        **config,
        **inflater.sizes,
        "num_hidden_layers": layers,
        "outrider_inflated": {
            "note": "computes the same function as its source, at this size's cost; see outrider.bench.inflate",
            "format": FORMAT,
            "parameters": params,
            "source": asdict(inflater.small),
            "real_layers": inflater.real_layers,
            "seed": seed,
        },
    }
    if "layer_types" in new:  # one entry per layer, all equal
        new["layer_types"] = [new["layer_types"][0]] * layers
    (out / "config.json").write_text(json.dumps(new, indent=2) + "\n")


def inflated(source: str | Path, size: str) -> Path:
    """Return the cached folder of ``source`` inflated to ``size``, built if missing; keyed by content, size and format."""
    source = Path(source)
    num_params(size)
    if not (source / "config.json").is_file():
        raise OutriderError(not_a_model_folder(source))
    folder = cache_folder(f"{source.resolve().name}-{size.lower()}", f"{FORMAT}/{size.lower()}".encode(), source)
    return built_once(folder, lambda: inflate(source, folder, size))


def built_once(folder: Path, build: Callable[[], object]) -> Path:
    """Return a folder of the cache, built if missing. Two processes may build it: the first to finish wins."""
    if not folder.is_dir():
        try:
            build()
        except OutriderError:
            if not folder.is_dir():
                raise
    return folder


def cache_folder(name: str, key: bytes, source: Path) -> Path:
    """Return the folder of the cache for something made from ``key`` and from a folder, by the content of what is read."""
    digest = hashlib.sha256(key)
    for file in sorted({*weight_files(source), *(file for file in source.iterdir() if file.suffix in hub.SMALL)}):
        with file.open("rb") as opened:
            digest.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return lasting_dir("inflated") / f"{name}-{digest.hexdigest()[:12]}"
