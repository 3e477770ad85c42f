"""``calfat doctor``: what is wrong with this installation, and how to fix it.

The checks expect a broken installation, so whatever a third party's import raises is a finding, not a crash.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.errors import PluginError
from calfat_plugin.host.installed import how_to_get_a_host, version_of
from calfat_plugin.registry import BLOCK_VARIABLE, BUILT_IN, Registry
from calfat_plugin.report.numbers import counted

_OURS = "calfat-plugin"
_WIDTH = 80
_INDENT = 26
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_PIP = f"{shlex.quote(sys.executable)} -m pip"
_SOURCE = Path(__file__).resolve().parents[2]
_HOST_SECONDS = 180  # importing fedml takes some six seconds; a cold disk may take longer
# With -c, Python looks into the current folder first, unlike calfat: a yaml.py of the user's would be in the way.
_IMPORT_HOST = """
import sys
if sys.path[0] == "":
    del sys.path[0]
import calfat_plugin.host.simulation
"""
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """What one check found: ``fail`` means that runs cannot work, ``warn`` that something is not as it should be."""

    status: Literal["ok", "warn", "fail"]
    check: str
    found: str
    todo: str = ""  # how to fix it


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Find what is wrong with this installation and say how to fix it.

    Exits with 1 when something that runs need is broken.
    """
    findings = []
    with json_output(as_json) as show:
        for finding in diagnose():
            findings.append(finding)
            if not as_json:
                click.echo(_wrapped(finding))
        show([dataclasses.asdict(finding) for finding in findings])
    failed, warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    if not as_json:
        wrong = f"{counted(failed, 'failure')}, {counted(warned, 'warning')}." if failed or warned else ""
        click.echo(wrong or "Nothing is wrong.")
    sys.exit(1 if failed else 0)


def _wrapped(finding: Finding) -> str:
    """A finding on 80 columns; what to do stays in one line, so that a command can be copied."""
    mark = click.style(f"{finding.status:<4}", fg=_COLOURS[finding.status], bold=finding.status != "ok")
    found = textwrap.wrap(finding.found, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
    text = f"{mark}  {finding.check:<{_INDENT - 6}}" + f"\n{' ' * _INDENT}".join(found)
    return text + (f"\n      -> {finding.todo}" if finding.todo else "")


def diagnose() -> Iterator[Finding]:
    """All findings, the quick ones first."""
    yield check_python()
    yield from check_versions()
    yield from check_plugins()
    yield check_gpu()
    yield check_host()


def check_python() -> Finding:
    """The version of Python, and whether this package is installed there or only lies in a folder."""
    found = f"{platform.python_version()} ({sys.executable})"
    if version_of(_OURS) is not None:
        return Finding("ok", "python", found)
    where = f"{_SOURCE} is not installed: there is no 'calfat' command, and 'fedml' runs no recipes."
    return Finding("warn", "python", f"{found}; {where}", f"{_PIP} install -e {shlex.quote(str(_SOURCE))}")


def check_versions() -> Iterator[Finding]:
    """What ``pip check`` finds, a finding a line: a failure where it is a need of ours, else a warning."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0:
        yield Finding("ok", "pip check", lines[-1] if lines else "no message")
    elif not lines:
        yield Finding("warn", "pip check", _last_line(done.stderr), f"{_PIP} --version")
    else:
        for line in lines:
            name = line.split()[0]
            yield Finding("fail" if name == _OURS else "warn", "pip check", line, f"{_PIP} install --upgrade {name}")


def check_plugins() -> Iterator[Finding]:
    """What was loaded beside the built-ins, and what was not."""
    try:
        registry = Registry.load()
    except PluginError as error:
        yield Finding("fail", "plugins", str(error), "No recipe can be run until then.")
        return
    for failure in registry.failures:
        todo = f"Fix, update or uninstall it, or start with {BLOCK_VARIABLE}={failure.provider.distribution}"
        yield Finding("warn", "plugins", f"not loaded: {failure}", todo)
    others = [f"{plugin.plugin} ({plugin})" for plugin in registry.plugins() if plugin is not BUILT_IN]
    yield Finding("ok", "plugins", ", ".join(["the built-ins", *others]))


def check_gpu() -> Finding:
    """Whether torch can be imported, and what it can train on."""
    try:
        import torch
    except Exception as error:
        return Finding("fail", "gpu", _reason(error), f"{_PIP} install --force-reinstall torch torchvision")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        return Finding("ok", "gpu", f"{', '.join(names)}; used where device_args.using_gpu is true")
    if not _DRIVER.exists() and shutil.which("nvidia-smi") is None:
        return Finding("ok", "gpu", "none; runs use the CPU")
    if torch.version.cuda is None:
        why = "torch is a build without CUDA"
        todo = "Install the CUDA build of torch; pytorch.org says which command that is here."
    else:
        why = f"torch (built for CUDA {torch.version.cuda}) sees no GPU"
        todo = "Compare that with the CUDA version that nvidia-smi shows, and look at CUDA_VISIBLE_DEVICES."
    return Finding("warn", "gpu", f"there is an NVIDIA driver, but {why}: runs use the CPU.", todo)


def check_host() -> Finding:
    """Which host there is; FedML and our adapters are imported, in a process of its own."""
    if version_of("fedml") is None:
        flower = version_of("flwr")
        if flower is not None:
            return Finding("ok", "host", f"Flower {flower}; FedML is not installed")
        return Finding("warn", "host", "none is installed; runs need one, all else does not.", how_to_get_a_host())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(_SOURCE), os.getenv("PYTHONPATH"))))}
    command = [sys.executable, "-c", _IMPORT_HOST]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_HOST_SECONDS)
    except subprocess.TimeoutExpired:
        found = f"took more than {_HOST_SECONDS} seconds."
        return Finding("fail", "import fedml", found, "Try again on a machine less busy.")
    if done.returncode == 0:
        return Finding("ok", "import fedml", "works, and so do our adapters")
    todo = f"{_PIP} install --force-reinstall {_OURS}"
    return Finding("fail", "import fedml", _last_line(done.stderr), todo)


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["no message"])[-1]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
