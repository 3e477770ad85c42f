"""The maths floor answers without torch: `calfat check` and `calfat plugins` import it and must
stay quick.
"""

from __future__ import annotations

import subprocess
import sys

FLOOR = [
    "threat",
    "seeds",
    "maths.attacks",
    "maths.averaging",
    "maths.losses",
    "maths.metrics",
]


def test_no_module_of_the_floor_imports_torch_numpy_or_the_host():
    program = (
        "import importlib, sys\n"
        f"for name in {FLOOR!r}: importlib.import_module('calfat_plugin.' + name)\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'sklearn', 'matplotlib', 'fedml'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
