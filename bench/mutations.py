"""Mutations of valid inputs, for ``fuzz.py``: JSON's structure, TOML's values, GGUF's numbers, anything's bytes."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

Mutate = Callable[[bytes, random.Random], bytes]

MAX_CHANGES = 4
ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "0", "\u0000", "\ud800", "../../etc/passwd", "a\nb", "%s%n{}", "é" * 300),
    *(0, -1, 1, 2, 3, 7, 255, 65536, 10**6, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1e-300, 1e308, -1e308, float("nan"), float("inf")),
    *([], {}, [[]], [None], [0] * 300, {"": ""}, {"a": {"b": {"c": []}}}, ["a", 1, None]),
)
ODD_TOML = (
    *("0", "-1", "1", "10000000000000000000000", "1e400", "nan", "inf", "true", '""', '"x"', "'a\\b'", "[]", "[1, [2]]"),
    *("{}", "{a = 1}", "1979-05-27", '"""\n"""', '"\\uD800"', "0x", "0b1", "_", "", '"\\u0000"', '"/dev/null"', '"a\nb"'),
)


def of_bytes(data: bytes, choose: random.Random) -> bytes:
    """Flip, insert, remove, repeat or truncate bytes."""
    found = bytearray(data)
    for _ in range(choose.randint(1, MAX_CHANGES)):
        at, end = sorted(choose.randrange(len(found) + 1) for _ in range(2))
        end = min(end, at + 64)
        match choose.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << choose.randrange(8)
            case 1:
                found[at:at] = bytes(
                    choose.choice(b'\x00\xff{}[]",:\\0-9eE \n\xc3\xed\xa0') for _ in range(choose.randint(1, 8))
                )
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = found[at:end] * choose.randint(1, 4)
            case 4 if choose.random() < 0.3:
                del found[at:]
            case _ if at < len(found):
                found[at] = choose.randrange(256)
    return bytes(found)


def of_value(value: Any, choose: random.Random, words: tuple[str, ...] = ()) -> Any:
    """Change some values of a JSON document; ``words`` are keys that its readers use."""
    for _ in range(choose.randint(1, MAX_CHANGES)):
        value = _changed(value, choose, words)
    return value


def _changed(value: Any, choose: random.Random, words: tuple[str, ...]) -> Any:
    """Descend to a random position and change the value there in place."""
    if not isinstance(value, (dict, list)) or not value or choose.random() < 0.02:
        return _odd(value, choose)
    parent = value
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        key = choose.choice(keys)
        inner = parent[key]
        if not isinstance(inner, (dict, list)) or not inner or choose.random() < 0.3:
            break
        parent = inner
    match choose.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[choose.choice([*words, *map(str, keys), ""])] = inner
        case 2 if isinstance(parent, dict) and words:
            parent[choose.choice(words)] = _odd(inner, choose)
        case 3:
            other = choose.choice(keys)
            parent[key], parent[other] = parent[other], parent[key]
        case 4:
            parent[key] = choose.choice(([inner], {"a": inner}, [inner] * 3))
        case _:
            parent[key] = _odd(inner, choose)
    return value


def _odd(value: Any, choose: random.Random) -> Any:
    """Return another value: for numbers often a near one, so that sizes no longer match, otherwise an unusual one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and choose.random() < 0.4:
        return choose.choice((value + 1, value - 1, value * 2, -value, value / 2, str(value)))
    if isinstance(value, str) and choose.random() < 0.3:
        return choose.choice((value + "x", value[: len(value) // 2], value.upper(), value * 50))
    return copy.deepcopy(choose.choice(ODD))  # later changes are made in place


def of_json(words: tuple[str, ...] = ()) -> Mutate:
    """Return a mutation of JSON texts: mostly of values, sometimes of bytes."""

    def mutate(data: bytes, choose: random.Random) -> bytes:
        if choose.random() < 0.15:
            return of_bytes(data, choose)
        try:
            value = json.loads(data)
        except ValueError:
            return of_bytes(data, choose)
        return json.dumps(of_value(value, choose, words)).encode()

    return mutate


def of_toml(data: bytes, choose: random.Random) -> bytes:
    """Replace a value, repeat, remove or swap lines, or change bytes."""
    if choose.random() < 0.3:
        return of_bytes(data, choose)
    lines = data.decode(errors="replace").splitlines()
    for _ in range(choose.randint(1, MAX_CHANGES)):
        if not lines:
            break
        at = choose.randrange(len(lines))
        match choose.randrange(5):
            case 0:
                lines.insert(at, choose.choice(lines))
            case 1:
                del lines[at]
            case 2:
                lines.insert(at, choose.choice(("[target]", "[[method]]", "a.b.c = 1", "# \u2028", "target.x = 1")))
            case _:
                lines[at] = re.sub(r"=.*", lambda _: f"= {choose.choice(ODD_TOML)}", lines[at])
    return "\n".join(lines).encode()


def of_safetensors(data: bytes, choose: random.Random) -> bytes:
    """Change the header of a safetensors file (JSON after an 8-byte length), or any bytes."""
    if choose.random() < 0.2:
        return of_bytes(data, choose)
    size = int.from_bytes(data[:8], "little")
    header = of_json(("dtype", "shape", "data_offsets", "__metadata__"))(data[8 : 8 + size], choose)
    length = len(header) if choose.random() < 0.9 else choose.choice((0, 1, len(header) - 1, 10**9, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + header + data[8 + size :]


def of_gguf(data: bytes, choose: random.Random) -> bytes:
    """Change numbers of a GGUF file: its counts and first keys, its tensors' shapes, types and offsets, or any."""
    found, tensors = bytearray(data), max(data.find(b"token_embd") - 8, 0)
    low, high = choose.choice(((0, 64), (0, 1024), (tensors, tensors + 2048), (0, len(data))))
    if len(found) < 64 or choose.random() < 0.2:
        return data[:low] + of_bytes(data[low:high], choose) + data[high:]
    for _ in range(choose.randint(1, MAX_CHANGES)):
        size, at = choose.choice((1, 4, 4, 8)), choose.randrange(low, min(high, len(found) - 8))
        held = int.from_bytes(found[at : at + size], "little")
        number = choose.choice(
            (held + 1, held - 1, held * 2, held << 32, 0, 1, 3, 8, 255, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)
        )
        found[at : at + size] = (number % 256**size).to_bytes(size, "little")
    return bytes(found)
