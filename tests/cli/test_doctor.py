"""``calfat doctor``: each check on what it is for, and the command around them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from calfat_plugin import registry
from calfat_plugin.cli import doctor
from calfat_plugin.cli.doctor import Finding
from calfat_plugin.registry import Provider
from tests.cli.runner import calfat
from tests.snapshot import TextSnapshot

PIP = f"{sys.executable} -m pip"


def stand_in_for_python(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started as Python runs a shell script."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_python().status == "ok"
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    finding = doctor.check_python()
    assert (finding.status, finding.todo) == ("warn", f"{PIP} install -e {Path(doctor.__file__).parents[2]}")
    assert "is not installed: there is no 'calfat' command" in finding.found


OURS = "calfat-plugin 0.1.0 has requirement numpy<2, but you have numpy 2.0."
OTHERS = "other 3 requires absent, which is not installed."


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'No broken requirements found.'", [("ok", "No broken requirements found.", "")]),
        (
            f"echo '{OURS}'; echo '{OTHERS}'; exit 1",
            [
                ("fail", OURS, f"{PIP} install --upgrade calfat-plugin"),
                ("warn", OTHERS, f"{PIP} install --upgrade other"),
            ],
        ),
        ("echo 'No module named pip' >&2; exit 1", [("warn", "No module named pip", f"{PIP} --version")]),
    ],
)
def test_versions(
    script: str, found: list[tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_python(script, tmp_path, monkeypatch)
    findings = list(doctor.check_versions())
    assert [(finding.status, finding.found, finding.todo) for finding in findings] == found
    assert {finding.check for finding in findings} == {"pip check"}


@pytest.mark.parametrize(
    ("names", "cuda", "driver", "status", "words"),
    [
        (["NVIDIA H200"], "12.6", True, "ok", "NVIDIA H200; used where device_args.using_gpu is true"),
        ([], "12.6", False, "ok", "none; runs use the CPU"),
        ([], None, True, "warn", "torch is a build without CUDA"),
        ([], "12.6", True, "warn", "torch (built for CUDA 12.6) sees no GPU"),
    ],
)
def test_gpus(
    names: list[str], cuda: str | None, driver: bool, status: str, words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor.check_gpu()
    assert (finding.status, bool(finding.todo)) == (status, status == "warn")
    assert words in finding.found


def test_a_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = "ModuleNotFoundError: import of torch halted; None in sys.modules"
    assert doctor.check_gpu() == Finding("fail", "gpu", found, f"{PIP} install --force-reinstall torch torchvision")


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        ("exit 0", "ok", "works, and so do our adapters"),
        ("echo Traceback >&2; echo 'ImportError: no pkg' >&2; exit 1", "fail", "ImportError: no pkg"),
        ("kill -9 $$", "fail", "no message"),
        ("exec sleep 60", "fail", "took more than 1 seconds."),
    ],
)
def test_the_host_s_import(
    script: str, status: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_python(script, tmp_path, monkeypatch)
    monkeypatch.setattr(doctor, "_HOST_SECONDS", 1 if "sleep" in script else 300)
    finding = doctor.check_host()
    assert (finding.status, finding.check, finding.found) == (status, "import fedml", found)
    assert bool(finding.todo) == (status == "fail")


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("yaml.py").write_text("open('executed', 'w').close()")
    simulation = tmp_path / "source" / "calfat_plugin" / "host" / "simulation.py"
    simulation.parent.mkdir(parents=True)
    simulation.write_text("import yaml\nyaml.SafeLoader\n")
    monkeypatch.setattr(doctor, "_SOURCE", tmp_path / "source")
    monkeypatch.setattr(doctor, "version_of", lambda name: "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert doctor.check_host() == Finding("ok", "import fedml", "works, and so do our adapters")
    assert not Path("executed").exists()


class BrokenPoint:
    """The entry point of a plugin that does not import."""

    name, module = "slow-at", "slow_at"

    def load(self) -> None:
        raise ModuleNotFoundError("No module named 'apex'")


def test_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", lambda: iter(()))
    assert list(doctor.check_plugins()) == [Finding("ok", "plugins", "the built-ins")]
    points = [(Provider("slow-at", "0.2", "slow-at"), BrokenPoint())]
    monkeypatch.setattr(registry, "_installed", lambda: iter(points))
    assert next(doctor.check_plugins()) == Finding(
        "warn",
        "plugins",
        "not loaded: slow-at (slow-at 0.2): ModuleNotFoundError: No module named 'apex'",
        "Fix, update or uninstall it, or start with CALFAT_BLOCK_PLUGINS=slow-at",
    )


# --- the command ------------------------------------------------------------------------------------------------------

FINE = Finding("ok", "python", "3.11.7")
ODD = Finding("warn", "gpu", "there is a driver " + "and so on " * 8, "do " + "this " * 30)
BROKEN = Finding("fail", "fedml", "is not installed.", "pip install fedml")


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [
        ((FINE,), 0, "Nothing is wrong."),
        ((ODD, ODD), 0, "0 failures, 2 warnings."),
        ((FINE, ODD, BROKEN), 1, "1 failure, 1 warning."),
    ],
)
def test_findings_are_wrapped_and_commands_are_not(
    findings: tuple[Finding, ...], code: int, last: str, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: iter(findings))
    ended = calfat("doctor")
    assert (ended.code, ended.out.splitlines()[-1], ended.err) == (code, last, "")
    snapshot(ended.out)
    as_json = calfat("doctor", "--json")
    assert as_json.code == code
    assert [Finding(**finding) for finding in json.loads(as_json.out)] == list(findings)


def test_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks on this very environment, the host's slow import aside; what fails says what to do."""
    monkeypatch.setattr(doctor, "check_host", lambda: Finding("ok", "import fedml", "not tried"))
    ended = calfat("doctor", "--json")
    findings = json.loads(ended.out)
    checks = list(dict.fromkeys(finding["check"] for finding in findings))
    assert checks == ["python", "pip check", "plugins", "gpu", "import fedml"]
    assert all(finding["todo"] for finding in findings if finding["status"] != "ok")
    assert ended.code == any(finding["status"] == "fail" for finding in findings)
