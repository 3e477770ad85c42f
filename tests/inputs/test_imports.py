from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["calfat_plugin.partitions.split", "calfat_plugin.datasets"])
def test_importing_leaves_heavy_packages_out(module):
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'torchvision', 'sklearn', 'scipy', 'PIL', 'fedml') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
