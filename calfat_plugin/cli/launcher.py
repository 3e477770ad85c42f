"""Whether ``fedml`` runs recipes in this environment, and how it is made to, or not to.

Two files decide: the launcher ``fedml``, which FedML installs, and a line for Python's start beside the installed
packages, which our wheel installs (:mod:`calfat_plugin.cli.fedml`). Versions before 0.1 had a launcher of their own.
"""

from __future__ import annotations

import os
import site
import sysconfig
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal

from calfat_plugin.errors import HostError
from calfat_plugin.host.arguments import TESTED_VERSIONS

Launcher = Literal["none", "host", "former"]

HOOK = "calfat_fedml.pth"
_LINE = Path(__file__).with_name(HOOK)
_SUFFIX = ".exe" if os.name == "nt" else ""
_OURS, _HOSTS = "from calfat_plugin.cli.main import main", "from fedml.cli.cli import cli as main"
_FORMER = b"calfat_plugin.cli.fedml"
INSTALL_HOST = f"pip install --force-reinstall --no-deps fedml=={TESTED_VERSIONS[-1]}"


def scripts() -> Path:
    """The folder of this environment's commands."""
    return Path(sysconfig.get_path("scripts"))


def which_launcher(folder: Path) -> Launcher:
    """Whose ``fedml`` is in a folder of commands: nobody's, the host's, or that of a former version of ours."""
    with suppress(OSError):
        return "former" if _FORMER in (folder / f"fedml{_SUFFIX}").read_bytes() else "host"
    return "none"


def is_linked() -> bool:
    """Whether Python's start has our line, so that the host's launcher runs recipes."""
    return any(place.exists() for place in _places())


def link() -> None:
    """Make ``fedml run RECIPE`` run recipes.

    Raises:
        HostError: there is no launcher, and none can be written.
        OSError: a folder of the environment cannot be written.
    """
    _put_the_host_s_launcher()
    if not is_linked():
        _places()[0].write_bytes(_LINE.read_bytes())


def unlink() -> None:
    """Make ``fedml`` the host's own command, as if this package were not installed.

    Raises:
        HostError, OSError: as :func:`link`.
    """
    _put_the_host_s_launcher()
    for place in _places():
        place.unlink(missing_ok=True)


def _places() -> list[Path]:
    """Where our line may be: beside this environment's packages, or beside this user's own."""
    folders = [sysconfig.get_path("purelib"), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [Path(folder) / HOOK for folder in folders]


def _put_the_host_s_launcher() -> None:
    """Write FedML's launcher where it is missing or a former one of ours, as our own ``calfat`` with another import."""
    if which_launcher(scripts()) == "host":
        return
    try:
        metadata.distribution("fedml")
    except metadata.PackageNotFoundError:
        raise HostError(f"fedml is not installed in this environment. Install it: {INSTALL_HOST}") from None
    ours = scripts() / "calfat"
    try:
        text = ours.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    if _OURS not in text:
        raise HostError(f"{scripts()} has no FedML launcher and no 'calfat' to make one from. Run: {INSTALL_HOST}")
    launcher = scripts() / "fedml"
    launcher.write_text(text.replace(_OURS, _HOSTS), encoding="utf-8")
    launcher.chmod(ours.stat().st_mode)
