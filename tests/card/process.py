"""Run the tests of ``on_card.py``, or some of them: ``python tests/card/process.py -k fedrbn``.

It compiles ``guard.cpp`` against torch's headers, loads it, and only then lets pytest import torch.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).parent
TORCH = Path((find_spec("torch") or sys.exit("torch is not installed")).origin or "").parent
LIBRARIES = TORCH / "lib"
#: A torch that was built with it has a guard and hooks of its own: no other can be registered.
BUILT_FOR_GPUS = any((LIBRARIES / f"libtorch_{name}.so").exists() for name in ("cuda", "hip"))


def main(arguments: list[str]) -> int:
    """The exit code of pytest with these arguments."""
    # A card's backward passes run in a thread of their own, which keeps the number of threads that torch had when it
    # started. Here they run kernels of the CPU, whose bits depend on that number.
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory(prefix="calfat-card-") as folder:
        guard = Path(folder, "guard.so")
        linked = (f"-L{LIBRARIES}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{LIBRARIES}")
        command = ("g++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", HERE / "guard.cpp", *linked)
        subprocess.run([*command, "-o", guard], check=True)
        ctypes.CDLL(str(guard))
    return pytest.main([str(HERE / "on_card.py"), "-p", "no:cacheprovider", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
