"""``calfat doctor``: each check on what it is for, and the command around them."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from calfat_plugin import __version__, registry
from calfat_plugin.cli import diagnosis, doctor
from calfat_plugin.cli.diagnosis import Declared, Finding, declared
from calfat_plugin.host.arguments import TESTED_VERSIONS
from calfat_plugin.registry import Provider
from tests.cli.runner import ROOT, Ended, calfat
from tests.inputs import on_disk
from tests.snapshot import TextSnapshot

PIP = f"{sys.executable} -m pip install"


# --- versions ---------------------------------------------------------------------------------------------------------


NEEDED = ("numpy<2,>=1.26", "no-such-distribution", "absent>=1; extra == 'dev'", "absent>=1; python_version < '3'")


def test_what_the_package_needs_is_checked_and_its_extras_are_not() -> None:
    found = list(diagnosis.check_versions(Declared(">=3.10", NEEDED, installed=True)))
    assert [(finding.check, finding.status) for finding in found] == [
        ("python", "ok"),
        ("numpy", "ok"),
        ("no-such-distribution", "fail"),
    ]


def test_versions_cannot_be_checked_without_packaging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert list(diagnosis.check_versions(Declared(">=3.10", NEEDED, installed=True))) == [
        Finding(
            "fail",
            "packaging",
            "versions were not checked: ModuleNotFoundError: import of packaging.requirements halted; None in "
            "sys.modules",
            f"{PIP} --force-reinstall packaging",
        )
    ]


@pytest.mark.parametrize("installed", [True, False])
def test_the_needs_are_read_from_the_metadata_or_from_setup_cfg(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        info = tmp_path / "calfat_plugin-9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: calfat-plugin\nVersion: 9\nRequires-Python: <3.12,>=3.10\n"
            "Requires-Dist: fedml==0.9.6\nRequires-Dist: torch>=2.7\nRequires-Dist: ruff>=1; extra == 'dev'\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setattr(diagnosis, "DISTRIBUTION", "no-such-distribution")
    ours = declared()
    assert ours.installed == installed
    assert SpecifierSet(ours.python) == SpecifierSet(">=3.10, <3.12")
    needed = {requirement.name: requirement for requirement in map(Requirement, ours.requirements)}
    assert {"fedml", "torch"} <= set(needed)
    assert str(needed["fedml"].specifier) == "==0.9.6"


def test_python_within_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnosis.check_python(SpecifierSet(">=3.10")).status == "ok"
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.7+")  # as builds from a checkout call themselves
    assert diagnosis.check_python(SpecifierSet(">=3.10")).status == "ok"


def test_python_outside_the_bounds() -> None:
    assert diagnosis.check_python(SpecifierSet(">=3.10, <3.10")) == Finding(
        "fail",
        "python",
        f"{platform.python_version()} ({sys.executable}); fedml 0.9.6 installs on >=3.10, <3.10 only.",
        "Make an environment with another Python, such as: python3.11 -m venv .venv",
    )


def test_the_package_installed_and_not() -> None:
    place = f"{__version__} in {ROOT}"
    assert diagnosis.check_package(Declared("", (), installed=True)) == Finding("ok", "calfat-plugin", place)
    assert diagnosis.check_package(Declared("", (), installed=False)) == Finding(
        "warn",
        "calfat-plugin",
        f"{place}, which is not installed: there is no 'calfat' command, and 'fedml' runs no recipes.",
        f"{PIP} -e {ROOT}",
    )


NUMPY = Requirement("numpy >=1.26, <2")
TORCH = Requirement("torch[extra] (>=2.7)")
FEDML = Requirement("fedml >=0.9")


@pytest.mark.parametrize(
    ("requirement", "version", "finding"),
    [
        (NUMPY, "1.26.4", Finding("ok", "numpy", "1.26.4 (>=1.26, <2)")),
        (NUMPY, "2.0.1", Finding("fail", "numpy", "2.0.1; allowed: >=1.26, <2.", f"{PIP} 'numpy >=1.26, <2'")),
        (NUMPY, None, Finding("fail", "numpy", "is not installed.", f"{PIP} 'numpy >=1.26, <2'")),
        (Requirement("click"), None, Finding("fail", "click", "is not installed.", f"{PIP} click")),
        (Requirement("click"), "8.1", Finding("ok", "click", "8.1 (any version)")),
        (NUMPY, "unknown", Finding("fail", "numpy", "unknown; allowed: >=1.26, <2.", f"{PIP} 'numpy >=1.26, <2'")),
        (TORCH, "2.13.0+cpu", Finding("ok", "torch", "2.13.0+cpu (>=2.7)")),
        (TORCH, "2.6.1+cpu", Finding("fail", "torch", "2.6.1+cpu; allowed: >=2.7.", f"{PIP} 'torch >=2.7'")),
        (TORCH, "2.14.0.dev1", Finding("ok", "torch", "2.14.0.dev1 (>=2.7)")),
        (FEDML, TESTED_VERSIONS[-1], Finding("ok", "fedml", f"{TESTED_VERSIONS[-1]} (>=0.9)")),
        (FEDML, "0.9.9", Finding("fail", "fedml", "0.9.9; tested: 0.9.6.", f"{PIP} 'fedml >=0.9'")),
    ],
)
def test_a_version(requirement: Requirement, version: str | None, finding: Finding) -> None:
    assert diagnosis.check_requirement(requirement, version) == finding


def test_the_version_of_what_is_not_installed() -> None:
    assert diagnosis.version_of("no-such-distribution") is None
    assert diagnosis.version_of("pytest") == metadata.version("pytest")


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ('{"url": "file:///home/me/my%20work", "dir_info": {"editable": true}}', "-e '/home/me/my work'"),
        ('{"url": "file:///home/me/work", "dir_info": {}}', "/home/me/work"),
        ('{"url": "https://example.org/a.whl"}', "calfat-plugin"),
        (None, "calfat-plugin"),
    ],
)
def test_the_package_is_reinstalled_from_where_it_came(
    origin: str | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "calfat_plugin-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: calfat-plugin\nVersion: 9\n")
    if origin is not None:
        (info / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(tmp_path)
    assert diagnosis.reinstall() == f"{PIP} --force-reinstall --no-deps {source}"


# --- gpu and host -----------------------------------------------------------------------------------------------------


def test_gpus() -> None:
    assert diagnosis.check_gpu(["NVIDIA H200"], cuda="12.6", driver=True) == Finding(
        "ok", "gpu", "NVIDIA H200; used where device_args.using_gpu is true"
    )
    assert diagnosis.check_gpu([], cuda="12.6", driver=False) == Finding("ok", "gpu", "none; runs use the CPU")
    assert diagnosis.check_gpu([], cuda=None, driver=True) == Finding(
        "warn",
        "gpu",
        "there is an NVIDIA driver, but torch is a build without CUDA: runs use the CPU.",
        "Install the CUDA build of torch; pytorch.org says which command that is here.",
    )
    assert diagnosis.check_gpu([], cuda="12.6", driver=True) == Finding(
        "warn",
        "gpu",
        "there is an NVIDIA driver, but torch (built for CUDA 12.6) sees no GPU: runs use the CPU.",
        "Compare that with the CUDA version that nvidia-smi shows, and look at CUDA_VISIBLE_DEVICES.",
    )


def test_torch_and_torchvision_import_here() -> None:
    first = next(diagnosis.check_torch())
    assert (first.status, first.check) == ("ok", "import torchvision")


def test_a_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert list(diagnosis.check_torch()) == [
        Finding(
            "fail",
            "import torch",
            "ModuleNotFoundError: import of torch halted; None in sys.modules",
            f"{PIP} --force-reinstall torch torchvision",
        )
    ]


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        ("exit 0", "ok", "works, and so do our adapters"),
        (
            "echo Traceback >&2; echo 'ImportError: no pkg_resources' >&2; exit 1",
            "fail",
            "ImportError: no pkg_resources",
        ),
        ("kill -9 $$", "fail", "no message"),
        ("exec sleep 60", "fail", "took more than 1 seconds."),
    ],
)
def test_the_host_s_import(
    script: str, status: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{script}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(diagnosis, "_HOST_SECONDS", 1)
    finding = diagnosis.check_host()
    assert (finding.status, finding.check, finding.found) == (status, "import fedml", found)
    assert bool(finding.todo) == (status == "fail")


# --- the command's name, plugins, folder ------------------------------------------------------------------------------

OURS = "#!/usr/bin/python\nfrom calfat_plugin.cli.fedml import main\n"
HOSTS = "#!/usr/bin/python\nfrom fedml.cli.cli import cli\n"


def scripts(folder: Path, text: str | None) -> Path:
    folder.mkdir()
    if text is not None:
        (folder / "fedml").write_text(text)
    return folder


LINK = "To run recipes with it: calfat link-fedml ('calfat run RECIPE' needs no link)"


def test_a_linked_command_first_on_the_path(tmp_path: Path) -> None:
    own = scripts(tmp_path / "bin", HOSTS)
    assert diagnosis.check_command(f"{own}/fedml", own, linked=True) == Finding(
        "ok",
        "fedml command",
        f"{own}/fedml is FedML's own, linked by calfat-plugin: 'fedml run RECIPE' runs recipes, all else is FedML's",
    )


def test_a_former_command_of_ours_needs_no_link(tmp_path: Path) -> None:
    own = scripts(tmp_path / "bin", OURS)
    assert diagnosis.check_command(f"{own}/fedml", own, linked=False) == Finding(
        "ok",
        "fedml command",
        f"{own}/fedml is of a former calfat-plugin: 'fedml run RECIPE' runs recipes, all else is FedML's",
    )


def test_a_linked_command_through_a_link(tmp_path: Path) -> None:
    own = scripts(tmp_path / "bin", HOSTS)
    (tmp_path / "fedml").symlink_to(own / "fedml")
    assert diagnosis.check_command(f"{tmp_path}/fedml", own, linked=True).status == "ok"


def test_a_linked_command_not_on_the_path(tmp_path: Path) -> None:
    own = scripts(tmp_path / "bin", HOSTS)
    assert diagnosis.check_command(None, own, linked=True) == Finding(
        "ok", "fedml command", f"{own}/fedml, which is not on PATH: type it whole, or activate the environment"
    )


def test_another_environment_s_command_first_on_the_path(tmp_path: Path) -> None:
    own, other = scripts(tmp_path / "bin", HOSTS), scripts(tmp_path / "other", HOSTS)
    assert diagnosis.check_command(f"{other}/fedml", own, linked=True) == Finding(
        "warn",
        "fedml command",
        f"{other}/fedml comes first on PATH and belongs to another environment.",
        f"Activate this environment, or type {own}/fedml",
    )


def test_a_command_without_a_link(tmp_path: Path) -> None:
    own = scripts(tmp_path / "bin", HOSTS)
    assert diagnosis.check_command(f"{own}/fedml", own, linked=False) == Finding(
        "warn", "fedml command", f"{own}/fedml is FedML's own, which does not run recipes.", LINK
    )


@pytest.mark.parametrize("linked", [True, False])
def test_no_command_at_all(linked: bool, tmp_path: Path) -> None:
    own = scripts(tmp_path / "bin", None)
    assert diagnosis.check_command(None, own, linked=linked) == Finding(
        "warn", "fedml command", f"there is none in {own}.", LINK
    )


class BrokenPoint:
    """The entry point of a plugin that does not import."""

    name, module = "slow-at", "slow_at"

    def load(self) -> None:
        raise ModuleNotFoundError("No module named 'apex'")


def test_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", lambda: iter(()))
    assert list(diagnosis.check_plugins()) == [Finding("ok", "plugins", "the built-ins")]
    points = [(Provider("slow-at", "0.2", "slow-at"), BrokenPoint())]
    monkeypatch.setattr(registry, "_installed", lambda: iter(points))
    assert next(diagnosis.check_plugins()) == Finding(
        "warn",
        "plugins",
        "not loaded: slow-at (slow-at 0.2): ModuleNotFoundError: No module named 'apex'",
        "Fix, update or uninstall it, or start with CALFAT_BLOCK_PLUGINS=slow-at",
    )


def test_data_sets_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot) -> None:
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "system"))
    assert diagnosis.check_data(tmp_path) == Finding(
        "ok", "data sets", f"digits; not in {tmp_path}: cifar10, cifar100, svhn, mnist, fmnist"
    )
    on_disk.write_fmnist(tmp_path / "plain")
    (tmp_path / "system/datasets").mkdir(parents=True)
    (tmp_path / "plain/FashionMNIST/raw").rename(tmp_path / "system/datasets/fashion-mnist")
    on_disk.write_cifar10(tmp_path / "cifar10")
    found = diagnosis.check_data(tmp_path)
    snapshot(found.found)
    (tmp_path / "system/datasets/fashion-mnist/train-labels-idx1-ubyte").unlink()
    assert "fmnist in" not in diagnosis.check_data(tmp_path).found


def test_a_folder_for_runs(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "runs"
    assert diagnosis.check_runs(folder) == Finding("ok", "run directories", f"{folder} can be written")
    assert not (tmp_path / "a").exists()


def test_a_folder_for_runs_that_cannot_be_written(tmp_path: Path) -> None:
    in_the_way = tmp_path / "runs"
    in_the_way.touch()
    assert diagnosis.check_runs(in_the_way) == Finding(
        "warn",
        "run directories",
        f"{in_the_way} cannot be written (Not a directory).",
        "Start runs from another folder, or say where to write with --run-dir",
    )


# --- the command ------------------------------------------------------------------------------------------------------

FINE = Finding("ok", "python", "3.11.7")
ODD = Finding("warn", "gpu", "there is a driver " + "and so on " * 8, "do " + "this " * 30)
BROKEN = Finding("fail", "fedml", "is not installed.", "pip install fedml")


def diagnosed(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: iter(findings))


def test_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed(monkeypatch, FINE)
    assert calfat("doctor") == Ended(0, "ok    python              3.11.7\nNothing is wrong.\n", "")


def test_findings_are_wrapped_and_commands_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed(monkeypatch, FINE, ODD, BROKEN)
    assert calfat("doctor") == Ended(
        1,
        "ok    python              3.11.7\n"
        "warn  gpu                 there is a driver and so on and so on and so on and so\n"
        "                          on and so on and so on and so on and so on\n"
        f"      -> {ODD.todo}\n"
        "fail  fedml               is not installed.\n"
        "      -> pip install fedml\n"
        "1 failure, 1 warning.\n",
        "",
    )


def test_warnings_alone_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed(monkeypatch, ODD, ODD)
    ended = calfat("doctor")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "0 failures, 2 warnings.")


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed(monkeypatch, FINE, BROKEN)
    ended = calfat("doctor", "--json")
    assert ended.code == 1
    assert json.loads(ended.out) == [
        {"status": "ok", "check": "python", "found": "3.11.7", "todo": ""},
        {"status": "fail", "check": "fedml", "found": "is not installed.", "todo": "pip install fedml"},
    ]


def test_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks on this very environment, the host's slow import aside; what fails says what to do."""
    monkeypatch.setattr(diagnosis, "check_host", lambda: Finding("ok", "import fedml", "not tried"))
    monkeypatch.setenv("PATH", os.defpath)
    ended = calfat("doctor", "--json")
    findings = json.loads(ended.out)
    assert {"python", "calfat-plugin", "fedml", "torch", "fedml command", "plugins", "gpu"} <= {
        finding["check"] for finding in findings
    }
    assert all(finding["todo"] for finding in findings if finding["status"] != "ok")
    assert ended.code == any(finding["status"] == "fail" for finding in findings)
