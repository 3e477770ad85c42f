"""``environment.json``: what a run ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from calfat_plugin.registry import Registry

_DISTRIBUTIONS = (
    "calfat-plugin",
    "fedml",
    "torch",
    "torchvision",
    "numpy",
    "scikit-learn",
    "pyautoattack",
    "pluggy",
    "safetensors",
)


def describe_environment(device: Any, registry: Registry, command: list[str], precision: str) -> dict[str, Any]:
    """Versions, device, threads, precision, plugins, commit; ready for JSON.

    Args:
        device: the ``torch.device`` of the run.
        registry: for the plugins that were loaded and those that failed.
        command: the command line.
        precision: what it computes in.
    """
    import torch

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "device": str(device),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "plugins": [f"{provider} ({provider.plugin})" for provider in registry.plugins()],
        "plugins_not_loaded": [str(failure) for failure in registry.failures],
        "commit": _commit(),
        "executable": sys.executable,
    }


def processor() -> str:
    """The processor's name and its vector units as torch uses them, which decide how sums are rounded."""
    import torch

    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        said = ""
    name = next((line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the source tree that this package runs from; None for an installed package or without git."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
