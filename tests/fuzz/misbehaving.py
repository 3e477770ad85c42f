"""What a case can do wrong, for the test of the bench."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from calfat_plugin.exact import parse_number
from calfat_plugin.federation.memory import PeakMemory

_HELD: list[bytearray] = []


def traceback() -> None:
    raise ValueError("12 and 'that'")


def traceback_of_ours() -> None:
    parse_number("x")


def silence() -> None:
    sys.exit(2)


def refusal() -> None:
    print("error: sampled.yaml: x", file=sys.stderr)
    sys.exit(2)


def nothing() -> None:
    pass


def other_code() -> None:
    sys.exit(1)


def crash() -> None:
    ctypes.string_at(0)


def slow() -> None:
    while time.process_time() < 0.3:
        pass


def endless() -> None:
    while True:
        pass


def memory() -> None:
    _HELD.append(bytearray(b"x") * 600_000_000)


def memory_before_a_round() -> None:
    memory()
    _HELD.clear()
    PeakMemory(SimpleNamespace(type="cpu")).begin()  # type: ignore[arg-type] # the bench's process has no torch


def much_memory() -> None:
    _HELD.append(bytearray(b"x") * 5_000_000_000)


def reads(path: str) -> None:
    if "wrong" in Path(path).read_text():
        raise KeyError(path)


def creates(path: str) -> None:
    Path(path).open("x").close()


def overwrites(path: str) -> None:
    Path(path).write_text("changed")
