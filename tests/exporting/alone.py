"""Programs in processes that can import a few packages only, as in an environment that has nothing else.

What is not allowed is not found there, also where it is installed. The slow tests of ``tests/install`` do the
same in environments that really hold nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.runner import Ended, python

_GUARD = """\
import sys


class Hidden:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            return None
        return self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
"""
_OURS = ["calfat_plugin", "fedml", "wandb", "torchvision", "safetensors"]
WITHOUT_ALL_BUT_TORCH = [*_OURS, "onnx", "onnxscript", "onnxruntime"]
WITHOUT_ALL_BUT_ONNXRUNTIME = [*_OURS, "torch", "onnx", "onnxscript"]


def alone(program: str, refused: list[str], cwd: Path) -> Ended:
    """Run a program where the packages ``refused`` cannot be imported."""
    return python(_GUARD.format(refused=refused) + program, cwd=cwd)


def programs(card: str) -> list[str]:
    """The Python programs that a card shows."""
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)
