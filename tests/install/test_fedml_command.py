"""The command ``fedml`` in every order of installing, upgrading and uninstalling, with pip and with uv."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import Ended
from tests.install.environments import Offline, fedml_wheel, of_version

OURS = Ended(2, "", "error: missing.yaml: no such file.\n")


def host(words: str, version: str = "0.9.6") -> Ended:
    return Ended(0, f"fedml {version}: {words}\n", "")


@pytest.fixture
def environment(tmp_path: Path) -> Offline:
    return Offline(tmp_path)


@pytest.fixture
def fedml(tmp_path: Path) -> Path:
    return fedml_wheel(tmp_path)


@pytest.fixture
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def answers(environment: Offline) -> list[Ended]:
    """A recipe; one of the host's subcommands, with an option of its own; and another of its commands."""
    lines = (("run", "missing.yaml"), ("run", "-v", "test", "list"), ("version",))
    return [environment.call("fedml", *line) for line in lines]


LINKED = [OURS, host("run -v test list"), host("version")]
NOT_LINKED = [host("run missing.yaml"), *LINKED[1:]]


def test_recipes_run_in_whatever_order_both_are_installed(environment: Offline, wheel: Path, fedml: Path) -> None:
    (environment.elsewhere / "test").mkdir()  # a folder that is an option's value
    for each in (wheel, fedml, wheel):
        environment.install(each)
    assert answers(environment) == LINKED
    (environment.site / "calfat_fedml.pth").unlink()  # as docs/host.md says
    assert answers(environment) == NOT_LINKED
    environment.install(wheel)
    assert answers(environment) == LINKED
    environment.uninstall("calfat-plugin")
    assert answers(environment) == NOT_LINKED
    assert [file.name for file in environment.site.glob("*calfat*")] == []


def test_upgrading_either_changes_nothing(environment: Offline, wheel: Path, fedml: Path, tmp_path: Path) -> None:
    environment.install(wheel, fedml)
    environment.install(of_version(wheel, "0.9.0", tmp_path))
    assert answers(environment) == LINKED
    environment.install(fedml_wheel(tmp_path, "0.9.7"))
    assert answers(environment) == [OURS, host("run -v test list", "0.9.7"), host("version", "0.9.7")]
    environment.uninstall("fedml")
    assert not (environment.bin / "fedml").exists()
    assert environment.call("calfat", "run", "missing.yaml") == OURS


def test_an_editable_installation_is_linked_too(environment: Offline, dist: Path, fedml: Path) -> None:
    environment.install(fedml)
    environment.pip("install", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(dist.with_name("source")))
    assert answers(environment) == LINKED
    assert environment.call("calfat", "check", "calfat_digits").code == 0
    environment.uninstall("calfat-plugin")
    assert answers(environment) == NOT_LINKED


def test_other_programs_start_as_if_nothing_were_there(environment: Offline, wheel: Path, fedml: Path) -> None:
    environment.install(wheel, fedml)
    program = "import sys; print(sorted(name for name in sys.modules if 'calfat' in name or 'fedml' in name))"
    assert environment.call("python", "-c", program) == Ended(0, "[]\n", "")
    (environment.site / "calfat_plugin" / "__init__.py").unlink()  # the line alone is left
    for file in (environment.site / "calfat_plugin").rglob("*.py"):
        file.unlink()
    assert environment.call("fedml", "version").out == host("version").out
