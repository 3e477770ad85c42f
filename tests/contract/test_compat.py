"""Imports: torchvision beside a torch of another build, whatever was imported before; and what speeds them up."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

from calfat_plugin.compat import quick_imports
from tests.cli.runner import Ended, python


def test_torchvision_can_be_imported() -> None:
    """Also after wandb, whose import hooks hide the package; every run imports it without."""
    for first in ("import wandb, calfat_plugin", "import calfat_plugin, torch"):
        done = python(f"{first}\nimport torchvision.datasets, torchvision.transforms, torchvision.models\n")
        assert done.code == 0, done.err


def test_what_makes_torchvision_importable_imports_nothing_until_then() -> None:
    """Also where somebody looks whether it is installed."""
    program = (
        "import calfat_plugin, importlib.util, sys\n"
        "assert importlib.util.find_spec('torchvision').origin.endswith('__init__.py')\n"
        "print(sorted({'torch', 'torchvision', 'numpy'} & set(sys.modules)))\n"
    )
    assert python(program) == Ended(0, "[]\n", "")


NETWORK = """
from torchvision.models import mobilenet_v2


def network(in_channels, image_size, num_classes):
    return mobilenet_v2(weights=None, num_classes=num_classes)
"""


def test_the_file_of_a_users_network_may_import_torchvision(tmp_path: Path) -> None:
    """As a plugin file, and as a module on the path."""
    (tmp_path / "seen.py").write_text(NETWORK)
    recipe = "{model_args: {model: 'seen:network'}, calfat: {trainer: standard}}"
    program = (
        "import sys\n"
        "from calfat_plugin.models.building import factory_at\n"
        "from calfat_plugin.recipe.document import parse_document\n"
        "from calfat_plugin.recipe.plugin_files import with_plugins\n"
        "from calfat_plugin.registry import Registry\n"
        "if sys.argv[1] == 'file':\n"
        f"    Registry.for_recipe(with_plugins(parse_document({recipe!r}, 'r.yaml'), ['seen.py']))\n"
        "print(factory_at('seen:network')(3, (32, 32), 7).classifier[1].out_features)\n"
    )
    for way, path in (("file", ()), ("path", (tmp_path,))):
        done = python(program, way, cwd=tmp_path, path=path, XDG_STATE_HOME=str(tmp_path / "state"))
        assert (done.code, done.out) == (0, "7\n"), done.err


def test_garbage_is_looked_for_again_after_imports_and_only_where_it_was_before() -> None:
    with suppress(ImportError), quick_imports():
        with quick_imports():
            pass
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
