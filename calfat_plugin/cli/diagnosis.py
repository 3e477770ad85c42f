"""The checks behind ``calfat doctor``: each looks at one thing and says what to do about it.

They expect a broken installation, so whatever a third party's import raises is a finding, not a crash.
"""

from __future__ import annotations

import configparser
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlparse

from calfat_plugin import __version__
from calfat_plugin.cli.launcher import is_linked, scripts, which_launcher
from calfat_plugin.errors import PluginError
from calfat_plugin.host.arguments import TESTED_VERSIONS
from calfat_plugin.recipe.schema import DataArgs
from calfat_plugin.registry import BLOCK_VARIABLE, BUILT_IN, Registry

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

Status = Literal["ok", "warn", "fail"]

DISTRIBUTION = "calfat-plugin"
SOURCE = Path(__file__).resolve().parents[2]  # the checkout, where this runs from one
_HOST_SECONDS = 180  # importing fedml takes some six seconds; a cold disk may take longer
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        status: ``fail``: runs cannot work; ``warn``: something is not as it should be; ``ok``.
        check: what was looked at.
        found: what is there.
        todo: how to fix it; empty when there is nothing to fix.
    """

    status: Status
    check: str
    found: str
    todo: str = ""


def diagnose() -> Iterator[Finding]:
    """All findings, the quick ones first."""
    ours = declared()
    yield check_package(ours)
    yield from check_versions(ours)
    yield check_command(shutil.which("fedml"), scripts(), linked=is_linked())
    yield from check_plugins()
    yield check_runs(Path("runs"))
    yield from check_torch()
    yield check_data(Path(DataArgs.data_cache_dir))
    yield check_host()


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def pip_install(*arguments: str) -> str:
    """The command that installs into this very environment."""
    return " ".join((shlex.quote(sys.executable), "-m pip install", *arguments))


def reinstall() -> str:
    """How to install this package once more, from where it came."""
    try:
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return pip_install("-e", shlex.quote(str(SOURCE)))
    source = DISTRIBUTION
    if origin.get("url", "").startswith("file:"):
        folder = shlex.quote(unquote(urlparse(origin["url"]).path))
        source = f"-e {folder}" if origin.get("dir_info", {}).get("editable") else folder
    return pip_install("--force-reinstall --no-deps", source)


# --- versions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declared:
    """What the package says it needs.

    Attributes:
        python: bounds on the version of Python, such as ``>=3.10, <3.12``.
        requirements: such as ``numpy>=1.26``, those of extras included.
        installed: whether the package is installed, or runs from a source tree that nobody installed.
    """

    python: str
    requirements: tuple[str, ...]
    installed: bool


def declared() -> Declared:
    """Read the metadata of the installed package, or ``setup.cfg`` where it is not installed."""
    try:
        ours = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        setup = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
        setup.read(SOURCE / "setup.cfg")
        options = setup["options"] if setup.has_section("options") else {}
        lines = tuple(filter(None, options.get("install_requires", "").splitlines()))
        return Declared(options.get("python_requires", ""), lines, installed=False)
    return Declared(ours.metadata["Requires-Python"] or "", tuple(ours.requires or ()), installed=True)


def check_versions(ours: Declared) -> Iterator[Finding]:
    """Python and every required package against the bounds that this package declares."""
    try:
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet
    except Exception as error:
        found = f"versions were not checked: {_reason(error)}"
        yield Finding("fail", "packaging", found, pip_install("--force-reinstall packaging"))
        return
    yield check_python(SpecifierSet(ours.python))
    for requirement in map(Requirement, ours.requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):  # not those of extras
            yield check_requirement(requirement, version_of(requirement.name))


def check_python(bounds: SpecifierSet) -> Finding:
    """The version of Python against ``bounds``."""
    found = f"{platform.python_version()} ({sys.executable})"
    if bounds.contains(".".join(map(str, sys.version_info[:3]))):  # python_version() may end in "+"
        return Finding("ok", "python", found)
    found += f"; fedml {TESTED_VERSIONS[-1]} installs on {_text(bounds)} only."
    todo = "Make an environment with another Python, such as: python3.11 -m venv .venv"
    return Finding("fail", "python", found, todo)


def check_package(ours: Declared) -> Finding:
    """Whether this package is installed."""
    place = f"{__version__} in {SOURCE}"
    if ours.installed:
        return Finding("ok", DISTRIBUTION, place)
    found = f"{place}, which is not installed: there is no 'calfat' command, and 'fedml' runs no recipes."
    return Finding("warn", DISTRIBUTION, found, pip_install("-e", shlex.quote(str(SOURCE))))


def check_requirement(requirement: Requirement, version: str | None) -> Finding:
    """An installed version against its bounds; the host's also against the versions that our patches know."""
    name, bounds = requirement.name, _text(requirement.specifier)
    if version is None:
        found = "is not installed."
    elif not _allows(requirement.specifier, version):
        found = f"{version}; allowed: {bounds}."
    elif name == "fedml" and version not in TESTED_VERSIONS:
        found = f"{version}; tested: {', '.join(TESTED_VERSIONS)}."
    else:
        return Finding("ok", name, f"{version} ({bounds or 'any version'})")
    return Finding("fail", name, found, pip_install(f"'{name} {bounds}'" if bounds else name))


def _allows(bounds: SpecifierSet, version: str) -> bool:
    with suppress(ValueError):  # it is no version; packaging before 24.1 raises then
        return bounds.contains(version, prereleases=True)
    return False


def _text(bounds: SpecifierSet) -> str:
    return ", ".join(sorted(map(str, bounds), reverse=True))  # the lower bound first


# --- torch, torchvision, GPU, host ------------------------------------------------------------------------------------


def check_torch() -> Iterator[Finding]:
    """Whether torch and torchvision can be imported together, and what torch sees."""
    try:
        import torch
    except Exception as error:
        yield Finding("fail", "import torch", _reason(error), _install_torch())
        return
    yield _check_torchvision()
    yield check_gpu(
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        cuda=torch.version.cuda,
        driver=_DRIVER.exists() or shutil.which("nvidia-smi") is not None,
    )


def _install_torch() -> str:
    return pip_install("--force-reinstall torch torchvision")


def _check_torchvision() -> Finding:
    from calfat_plugin.compat import make_torchvision_importable

    try:
        changed = make_torchvision_importable()
        import torchvision  # noqa: F401
    except Exception as error:
        return Finding("fail", "import torchvision", _reason(error), _install_torch())
    supplied = "built for CUDA beside a torch without it; calfat_plugin supplies what is missing"
    return Finding("ok", "import torchvision", supplied if changed else "built for this torch")


def check_gpu(names: list[str], *, cuda: str | None, driver: bool) -> Finding:
    """What torch can train on.

    Args:
        names: the GPUs that torch sees.
        cuda: the CUDA version that torch was built for, or None.
        driver: whether there is an NVIDIA driver on this machine.
    """
    if names:
        return Finding("ok", "gpu", f"{', '.join(names)}; used where device_args.using_gpu is true")
    if not driver:
        return Finding("ok", "gpu", "none; runs use the CPU")
    if cuda is None:
        why = "torch is a build without CUDA"
        todo = "Install the CUDA build of torch; pytorch.org says which command that is here."
    else:
        why = f"torch (built for CUDA {cuda}) sees no GPU"
        todo = "Compare that with the CUDA version that nvidia-smi shows, and look at CUDA_VISIBLE_DEVICES."
    return Finding("warn", "gpu", f"there is an NVIDIA driver, but {why}: runs use the CPU.", todo)


def check_host() -> Finding:
    """Whether the host and our adapters import, in a process of its own."""
    check = "import fedml"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), os.getenv("PYTHONPATH"))))}
    command = [sys.executable, "-c", "import calfat_plugin.host.simulation"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_HOST_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding("fail", check, f"took more than {_HOST_SECONDS} seconds.", "Try again on a machine less busy.")
    if done.returncode == 0:
        return Finding("ok", check, "works, and so do our adapters")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding("fail", check, last, reinstall().replace(" --no-deps", ""))


# --- command, plugins, folder -----------------------------------------------------------------------------------------


def check_command(first: str | None, scripts: Path, *, linked: bool) -> Finding:
    """Which ``fedml`` runs when somebody types it, and whether it runs recipes; ``calfat run`` does in any case.

    Args:
        first: the first ``fedml`` on PATH, or None.
        scripts: the folder of this environment's commands.
        linked: whether Python's start has our line.
    """
    check, own, found = "fedml command", scripts / "fedml", which_launcher(scripts)
    link = "To run recipes with it: calfat link-fedml ('calfat run RECIPE' needs no link)"
    if found == "none":
        return Finding("warn", check, f"there is none in {scripts}.", link)
    if found == "host" and not linked:
        return Finding("warn", check, f"{own} is FedML's own, which does not run recipes.", link)
    if first is None:
        return Finding("ok", check, f"{own}, which is not on PATH: type it whole, or activate the environment")
    if Path(first).resolve() != own.resolve():
        other = f"{first} comes first on PATH and belongs to another environment."
        return Finding("warn", check, other, f"Activate this environment, or type {own}")
    whose = "FedML's own, linked by calfat-plugin" if found == "host" else "of a former calfat-plugin"
    return Finding("ok", check, f"{first} is {whose}: 'fedml run RECIPE' runs recipes, all else is FedML's")


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


def check_runs(folder: Path) -> Finding:
    """Whether run directories can be made in ``folder``, which need not exist yet."""
    folder = folder.absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        todo = "Start runs from another folder, or say where to write with --run-dir"
        return Finding("warn", "run directories", f"{nearest} cannot be written ({error.strerror}).", todo)
    return Finding("ok", "run directories", f"{folder} can be written")


def check_data(root: Path) -> Finding:
    """Which data sets are there; their files are not read.

    Args:
        root: where recipes look that name no ``data_args.data_cache_dir``; the system's own folders are looked at, too.
    """
    try:
        from calfat_plugin.datasets.published import FILES

        seen = {name: files().seen(root) for name, files in FILES.items()}
    except Exception as error:
        return Finding("warn", "data sets", f"were not looked for: {_reason(error)}", _install_torch())
    found = ["digits", *(f"{name} in {folder}" for name, folder in seen.items() if folder)]
    missing = [name for name, folder in seen.items() if not folder]
    rest = f"; not in {root}: {', '.join(missing)}" if missing else ""
    return Finding("ok", "data sets", ", ".join(found) + rest)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
