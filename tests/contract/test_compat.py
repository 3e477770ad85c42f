"""Imports: torchvision beside a torch of another build, whatever was imported before; and what speeds them up."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import suppress

from calfat_plugin.compat import quick_imports


def test_torchvision_can_be_imported() -> None:
    """Also after wandb, whose import hooks hide the package; every run imports it without."""
    code = (
        "import wandb\n"
        "from calfat_plugin.compat import make_torchvision_importable\n"
        "make_torchvision_importable()\n"
        "import torchvision.datasets, torchvision.transforms\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_garbage_is_looked_for_again_after_imports_and_only_where_it_was_before() -> None:
    with suppress(ImportError), quick_imports():
        with quick_imports():
            pass
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
