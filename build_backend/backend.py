"""setuptools' build backend; wheels also get ``calfat_fedml.pth``, which setuptools has no setting for.

The file lies beside the packages, where Python reads it at its start (``calfat_plugin/cli/fedml.py`` says what for).
Editable installs have it, too, and an uninstall removes it with the rest.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_HOOK = Path("calfat_plugin", "cli", "calfat_fedml.pth")


def build_wheel(wheel_directory: str, *arguments: Any, **options: Any) -> str:
    """PEP 517; returns the wheel's file name."""
    return _with_hook(wheel_directory, build_meta.build_wheel(wheel_directory, *arguments, **options))


def build_editable(wheel_directory: str, *arguments: Any, **options: Any) -> str:
    """PEP 660; returns the wheel's file name."""
    return _with_hook(wheel_directory, build_meta.build_editable(wheel_directory, *arguments, **options))


def _with_hook(folder: str, name: str) -> str:
    path, hook = Path(folder, name), _HOOK.read_bytes()
    digest = urlsafe_b64encode(hashlib.sha256(hook).digest()).rstrip(b"=").decode()
    with ZipFile(path) as wheel:
        files = [(info, wheel.read(info)) for info in wheel.infolist()]
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        wheel.writestr(_HOOK.name, hook)
        for info, content in files:
            if info.filename.endswith(".dist-info/RECORD"):
                content += f"{_HOOK.name},sha256={digest},{len(hook)}\n".encode()
            wheel.writestr(info, content, ZIP_DEFLATED)
    return name
