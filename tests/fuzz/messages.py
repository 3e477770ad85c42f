"""Wire messages of a real run, mutated: as bytes, in their header, in their fields, in their tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fuzz.bench import Case
from tests.fuzz.texts import VALUES, change_bytes

DTYPES = {  # to bytes; what safetensors knows, and what it does not
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "X"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
_LENGTH = 8  # safetensors: the header's length, little endian
_BYTES = (b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\1\0\0\0")

Header = dict[str, Any]


def cases(seed: int, count: int, captured: Sequence[bytes], receive: str) -> Iterator[Case]:
    """Messages to a server that waits for one more update.

    Args:
        captured: updates that a client sent.
        receive: ``module:function`` that hands a file's bytes to such a server.
    """
    for number in range(count):
        name = f"message, seed {seed}, number {number}"
        rng = random.Random(name)
        content = rng.choice(captured)
        for _ in range(rng.choice([1, 1, 2, 4])):
            content = rng.choice(_CHANGES)(content, rng)
        yield Case(name, ("message.bin",), {"message.bin": content}, target=receive)


def _parsed(content: bytes) -> tuple[Header, bytes] | None:
    length = int.from_bytes(content[:_LENGTH], "little")
    try:
        header = json.loads(content[_LENGTH : _LENGTH + length])
    except ValueError:
        return None
    return (header, content[_LENGTH + length :]) if isinstance(header, dict) else None


def _written(header: Header, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(_LENGTH, "little") + text + data


def _fields(content: bytes, rng: random.Random) -> bytes:
    """Another value of a field, or one field less or more."""
    parsed = _parsed(content)
    if parsed is None:
        return change_bytes(content, rng)
    header, data = parsed
    try:
        fields = json.loads(header["__metadata__"]["calfat"])
        name = rng.choice([*fields, *fields, "model_params", "extra"])
    except (KeyError, TypeError, ValueError):
        return change_bytes(content, rng)
    if rng.random() < 0.2:
        fields.pop(name, None)
    else:
        fields[name] = rng.choice([*VALUES, 10**30, "\ud800", "\x1b[2J"])
    header["__metadata__"]["calfat"] = json.dumps(fields)
    return _written(header, data)


def _tensor(content: bytes, rng: random.Random) -> bytes:
    """Another name, type, shape or place of a tensor."""
    parsed = _parsed(content)
    names = [name for name in parsed[0] if name != "__metadata__"] if parsed else []
    if parsed is None or not names or not isinstance(parsed[0][names[0]], dict):
        return change_bytes(content, rng)
    header, data = parsed
    name = rng.choice(names)
    entry = header[name]
    way = rng.randrange(6)
    if way == 0:
        others = ["refused/reason", "metric/loss", "scaffold/x", "", "\x1b[31m", "client/x", "a" * 9000, f"{name}x"]
        header[rng.choice(others)] = header.pop(name)
    elif way == 1:
        entry["dtype"] = rng.choice([*DTYPES, 3])
    elif way == 2:
        entry["shape"] = rng.choice([[], [0], [-1], [1, 1], [2**40], [2**63], entry.get("shape", [])[::-1], "x", None])
    elif way == 3:
        entry["data_offsets"] = rng.choice([[0, 0], [0, len(data)], [5, 1], [-4, 4], [0, 2**70], "x", None])
    elif way == 4:
        del header[name]
    else:
        header[name] = rng.choice(VALUES)
    return _written(header, data)


def _whole_tensor(content: bytes, rng: random.Random) -> bytes:
    """One tensor of another type, well described: what only the checks of values can see."""
    parsed = _parsed(content)
    if parsed is None:
        return change_bytes(content, rng)
    header, data = parsed
    dtype = rng.choice(list(DTYPES))
    shape = rng.choice([[], [1], [3], [2, 2]])
    size = DTYPES[dtype]
    for side in shape:
        size *= side
    name = rng.choice([*(name for name in header if name != "__metadata__"), "refused/reason", "metric/loss", "x/y"])
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
    return _written(header, data + rng.randbytes(size))


def _numbers(content: bytes, rng: random.Random) -> bytes:
    """Infinities, nan and huge numbers among the weights."""
    parsed = _parsed(content)
    if parsed is None or len(parsed[1]) < _LENGTH:
        return change_bytes(content, rng)
    data = bytearray(parsed[1])
    many = rng.choice([1, 3, len(data) // 4])
    number = rng.choice(_BYTES)
    for place in rng.sample(range(len(data) // 4), many):
        data[4 * place : 4 * place + 4] = number
    return _written(parsed[0], bytes(data))


_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _fields,
    _fields,
    _tensor,
    _tensor,
    _whole_tensor,
    _numbers,
    change_bytes,
)
