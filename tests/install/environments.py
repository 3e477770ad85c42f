"""Built distributions and empty environments, where nothing is fetched from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from tests.cli.runner import ROOT, Ended

UV = shutil.which("uv", path=sysconfig.get_path("scripts")) or "uv"
# Stand-ins take the place of the first two, and without torch nothing takes seconds to start.
_HIDDEN = ("calfat", "__editable__", "fedml", "torch")


def build(folder: Path) -> Path:
    """Build sdist and wheel of the working tree into ``folder``, with the build backend that is installed here."""
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=_made)
    out = folder / "dist"
    run(UV, "build", "--offline", "--no-build-isolation", "--python", sys.executable, "-o", str(out), str(source))
    return out


def _made(folder: str, names: list[str]) -> set[str]:
    """What is no source: beside the sources, and caches everywhere."""
    beside = {"build", "dist", "runs"} if Path(folder) == ROOT else set()
    hidden = {name for name in names if name.startswith(".") and name not in (".ci", ".gitignore")}
    return beside | hidden | {name for name in names if name == "__pycache__" or name.endswith(".egg-info")}


def run(*command: str) -> None:
    """Run what must work; its output is in the error otherwise."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def fedml_wheel(folder: Path, version: str = "0.9.6") -> Path:
    """A tiny distribution that is called fedml, whose command repeats its arguments."""
    info = f"fedml-{version}.dist-info"
    files = {
        "fedml/__init__.py": "",
        "fedml/cli/__init__.py": "",
        "fedml/cli/cli.py": f"import sys\n\n\ndef cli():\n    print('fedml {version}:', *sys.argv[1:])\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: fedml\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nfedml = fedml.cli.cli:cli\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    return _wheel(folder / f"fedml-{version}-py3-none-any.whl", files)


def of_version(wheel: Path, version: str, folder: Path) -> Path:
    """A copy of our wheel that says to be of another version."""
    old = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as content:
        files = {name: content.read(name).decode() for name in content.namelist()}
    changed = {
        name.replace(f"-{old}.dist-info", f"-{version}.dist-info"): text.replace(
            f"-{old}.dist-info", f"-{version}.dist-info"
        ).replace(f"\nVersion: {old}\n", f"\nVersion: {version}\n")
        for name, text in files.items()
    }
    return _wheel(folder / wheel.name.replace(f"-{old}-", f"-{version}-"), changed)


def _wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


class _Environment:
    """A virtual environment, and an empty folder in which its commands are called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.elsewhere = folder, folder / "env" / "bin", folder / "elsewhere"
        self.python = self.bin / "python"
        self.elsewhere.mkdir()

    def call(self, *words: str) -> Ended:
        """Run a command, of the environment or of the system."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["PATH"] = os.pathsep.join((str(self.bin), env["PATH"]))
        done = subprocess.run(words, cwd=self.elsewhere, env=env, capture_output=True, text=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)


class Offline(_Environment):
    """It sees what is installed here, but for FedML and ourselves, and takes wheels alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        venv.create(folder / "env", symlinks=True)
        (self.site / "zz_libraries.pth").write_text(f"{_libraries(folder / 'libraries')}\n")

    @property
    def site(self) -> Path:
        (site,) = self.folder.glob("env/lib/python*/site-packages")
        return site

    def pip(self, command: str, *words: str) -> None:
        run(UV, "pip", command, "--python", str(self.python), *words)

    def install(self, *wheels: Path) -> None:
        """Install wheels, also if they are there, and nothing that they need."""
        self.pip("install", "--no-deps", "--no-index", "--reinstall", *map(str, wheels))

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", name)


class Downloaded(_Environment):
    """It takes whatever pip or uv brings.

    Args:
        folder: where to make it.
        python: interpreter, or a version such as ``3.13``, which uv may have to bring.
        tool: ``pip`` or ``uv``.
    """

    def __init__(self, folder: Path, python: str, tool: str = "uv") -> None:
        super().__init__(folder)
        self._uses_uv = tool == "uv"
        run(UV, "venv", "--seed", "--python", python, str(folder / "env"))

    def install(self, *words: str, again: bool = False) -> None:
        """Install what the words of the tool's command say; ``again``: also if it is there."""
        uv, pip = (UV, "pip", "install", "--python", str(self.python)), (str(self.bin / "pip"), "install")
        repeat = ("--reinstall" if self._uses_uv else "--force-reinstall",) if again else ()
        run(*(uv if self._uses_uv else pip), *repeat, *words)


def interpreter(version: str) -> str | None:
    """This machine's Python of a version such as ``3.13``; None where it has none."""
    find = (UV, "python", "find", "--no-project", "--no-managed-python", version)
    found = subprocess.run(find, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return found.stdout.strip()
    return next(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")), None)


def _libraries(folder: Path) -> Path:
    """What is installed here, without FedML and ourselves."""
    folder.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in Path(place).iterdir():
            if not found.name.startswith(_HIDDEN) and found.suffix != ".pth":
                (folder / found.name).symlink_to(found)
    return folder
