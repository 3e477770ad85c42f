from __future__ import annotations

import os
import subprocess
import sys

import pytest

from calfat_plugin.datasets import published
from calfat_plugin.errors import DataError


@pytest.mark.parametrize("module", ["calfat_plugin.partitions.split", "calfat_plugin.datasets"])
def test_importing_leaves_heavy_packages_out(module):
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'torchvision', 'sklearn', 'scipy', 'PIL', 'fedml') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_digits_are_scikit_learns_without_its_import(monkeypatch):
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "sklearn", raising=False)
        data = published.load_digits()
        assert "sklearn" not in sys.modules

    import torch
    from sklearn.datasets import load_digits

    bunch = load_digits()
    known = {(tuple(x), y) for x, y in zip(bunch.data.tolist(), bunch.target.tolist(), strict=True)}
    x, y = (torch.cat([getattr(part, name) for part in (data.train, data.test)]) for name in ("x", "y"))
    assert (x.shape, len(known)) == ((1797, 1, 8, 8), 1797)
    assert {(tuple(i), j) for i, j in zip((x * 16).flatten(1).tolist(), y.tolist(), strict=True)} == known


def test_a_scikit_learn_without_digits_is_named(monkeypatch, tmp_path):
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError) as error:
        published.load_digits()
    assert str(error.value) == (
        "digits: scikit-learn's package has no datasets/data/digits.csv.gz. Install scikit-learn again."
    )


@pytest.mark.parametrize(("set_before", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_do_not_spin_unless_the_user_says_so(set_before, found):
    code = (
        "import os, sys; from calfat_plugin.cli.main import main; assert 'torch' not in sys.modules; "
        "main(['recipes'], standalone_mode=False); print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {} if set_before is None else {"OMP_WAIT_POLICY": set_before}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == found
