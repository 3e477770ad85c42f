"""torchvision beside a torch of another build: importable, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("first", ["", "import wandb"], ids=["nothing", "wandb, whose import hooks hide the package"])
def test_torchvision_can_be_imported(first: str) -> None:
    code = (
        f"{first}\n"
        "from calfat_plugin.compat import make_torchvision_importable\n"
        "make_torchvision_importable()\n"
        "import torchvision.datasets, torchvision.transforms\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
