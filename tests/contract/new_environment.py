"""A new virtual environment that sees the packages of this one: plain pip installs plugins there, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.cli.runner import ROOT, Ended
from tests.environment import bare

_SCRIPT = '#!/bin/sh\nexec "{python}" -m {module} "$@"\n'


@dataclass(frozen=True)
class NewEnvironment:
    """Commands of a shell in which the environment is active.

    Attributes:
        folder: of the environment; nothing is written elsewhere but by the commands themselves.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> NewEnvironment:
        """Its own site-packages come first, then this working tree, then what this process has installed."""
        venv.create(folder, symlinks=True, with_pip=False)
        made = cls(folder)
        below = sysconfig.get_paths()
        seen = dict.fromkeys([str(ROOT), below["purelib"], below["platlib"]])
        (made.site_packages / "this.pth").write_text("\n".join(seen) + "\n")
        for name, module in (("pip", "pip"), ("calfat", "calfat_plugin.cli.main"), ("pytest", "pytest")):
            script = folder / "bin" / name
            script.write_text(_SCRIPT.format(python=folder / "bin" / "python", module=module))
            script.chmod(0o755)
        return made

    @property
    def site_packages(self) -> Path:
        """Where pip installs to."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def shell(self, script: str, cwd: Path) -> Ended:
        """Run the lines of a script, up to the first that fails."""
        env = bare(
            PATH=os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            HOME=str(self.folder),
            LANG="C.UTF-8",
            CUDA_VISIBLE_DEVICES="",
            OMP_NUM_THREADS="1",
            PYTHONDONTWRITEBYTECODE="1",
            PIP_DISABLE_PIP_VERSION_CHECK="1",
            PIP_NO_INDEX="1",  # what is not here is an error, not a download
            PIP_ROOT_USER_ACTION="ignore",
        )
        done = subprocess.run(["sh", "-e", "-c", script], cwd=cwd, env=env, capture_output=True, text=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)
