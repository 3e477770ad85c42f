"""Plugins that are a single file: which ones a recipe has (``calfat.plugins``), and how such a file becomes a module.

A recipe as run has each file's place and SHA-256, so a run goes on with the very code that it was started with, in this
process and in every other one that reads the recipe. A file of this user notes the content of each plugin that was run:
a run directory that somebody else made names code that is not among them, and is not followed unasked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from calfat_plugin.disk import expanded, read_bytes, state_folder
from calfat_plugin.errors import PluginError, did_you_mean
from calfat_plugin.options import Tag, option, tagged
from calfat_plugin.peer_text import error_text
from calfat_plugin.recipe.document import Document, KeyPath

PLUGINS: KeyPath = ("calfat", "plugins")
_MAX_BYTES = 1_000_000  # nobody writes a longer program by hand


@dataclass(frozen=True)
class PluginFileOptions:
    """``calfat.plugins.<module>``: a plugin that is a single file."""

    file: str = tagged(
        Tag.FREE | Tag.OF_A_PARTY,  # its SHA-256 says whether it is the same
        option(help="the file, `<module>.py`; `--plugin FILE` writes it here with its whole path"),
    )
    sha256: str | None = option(None, help="of its content; null: as it is now. A recipe as run has it")


@dataclass(frozen=True)
class PluginFile:
    """A Python file with hooks, or with what a recipe names as ``module:factory``, and the SHA-256 of its content."""

    path: Path
    sha256: str

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.path.stem

    def as_run(self) -> dict[str, str]:
        """The section of this file in a recipe as run."""
        return {"file": str(self.path), "sha256": self.sha256}

    def load(self) -> ModuleType:
        """The module. A process runs each content of the file once."""
        content = _content(self.path)
        now = hashlib.sha256(content).hexdigest()
        if now != self.sha256:
            raise PluginError(
                f"{self.path}: this plugin has changed: its SHA-256 was {self.sha256[:12]}…, it is {now[:12]}… now. "
                "Restore it, or start a new run with it as it is."
            )
        loaded = sys.modules.get(self.name)
        if loaded is not None and getattr(loaded, "__sha256__", None) == self.sha256:
            return loaded
        taken = self._other_module()
        if taken is not None and Path(taken).resolve() != self.path.resolve():
            raise PluginError(f"{self.path}: there is a module '{self.name}' already ({taken}); rename the file.")
        self.remember()
        return self._executed(content)

    def _other_module(self) -> str | None:
        """The place of another module of this name, which is not a plugin file; None: there is none."""
        loaded = sys.modules.get(self.name)
        if loaded is None:
            spec = importlib.util.find_spec(self.name)
            if spec is None:
                return None
            return spec.origin or "a folder"
        if hasattr(loaded, "__sha256__"):  # another content of this plugin, which is replaced
            return None
        return getattr(loaded, "__file__", None) or "Python itself"

    def _executed(self, content: bytes) -> ModuleType:
        """Run the file as a module of its name."""
        module = ModuleType(self.name)
        module.__file__ = str(self.path)
        vars(module)["__sha256__"] = self.sha256
        sys.modules[self.name] = module  # dataclasses look their module up, and so does build="<module>:Class"
        try:
            exec(compile(content, str(self.path), "exec"), vars(module))
        except BaseException as error:  # an author's file may raise anything; Ctrl-C may end it half loaded
            del sys.modules[self.name]
            if not isinstance(error, (Exception, SystemExit)):
                raise
            place = str(self.path)
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(self.path):
                    place = f"{self.path}:{frame.lineno}"  # the last one: the line that raised it
            raise PluginError(f"{place}: {error_text(error)}") from error
        return module

    def remember(self) -> None:
        """Note that this user has run this very content."""
        if self.is_known():
            return
        with suppress(OSError):  # then is_known says no later
            _known_plugins().parent.mkdir(parents=True, exist_ok=True)
            with _known_plugins().open("a", encoding="ascii") as file:
                file.write(f"{self.sha256}\n")

    def is_known(self) -> bool:
        """Whether this user has run this very content before."""
        try:
            known = _known_plugins().read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):  # there is no such file, or it cannot be read
            return False
        return self.sha256 in known


def plugin_files(document: Document) -> dict[str, PluginFile]:
    """Module name to plugin file, as ``calfat.plugins`` of a recipe lists them."""
    files = {}
    for name in document.section(PLUGINS, "a section of plugin files, by module name"):
        options = document.options((*PLUGINS, name), PluginFileOptions)
        path = expanded(options.file).absolute()
        if path.name != f"{name}.py" or not name.isidentifier():
            raise document.error(
                (*PLUGINS, name, "file"), f"got '{options.file}', expected a Python file of the module '{name}'."
            )
        files[name] = PluginFile(path, options.sha256 or _digest(path))
    return files


def with_plugins(document: Document, files: Iterable[str | Path]) -> Document:
    """A copy of a recipe with these plugin files, each as it is now, instead of any of the same module name."""
    path_of_module: dict[str, Path] = {}
    for file in files:
        place = f"--plugin {file}"
        path = expanded(file).absolute()
        if path.suffix != ".py" or not path.stem.isidentifier():
            raise PluginError(f"{place}: expected a Python file whose name is a module's, such as my_method.py.")
        if path.is_dir():
            raise PluginError(f"{place}: this is a directory, expected a Python file.")
        if not path.is_file():
            beside = [other.name for other in path.parent.glob("*.py") if other.is_file()]
            raise PluginError(f"{place}: no such file.{did_you_mean(path.name, beside)}")
        first = path_of_module.setdefault(path.stem, path)
        if not first.samefile(path):
            raise PluginError(f"{place}: {first} is a module '{path.stem}', too; rename one of the two files.")
        plugin = PluginFile(path, _digest(path))
        document = document.with_value((*PLUGINS, plugin.name), plugin.as_run(), place)
    return document


def _known_plugins() -> Path:
    """The SHA-256 of plugin files that this user has run, one a line."""
    return state_folder() / "plugins.sha256"


def _digest(path: Path) -> str:
    return hashlib.sha256(_content(path)).hexdigest()


def _content(path: Path) -> bytes:
    try:
        content = read_bytes(path, _MAX_BYTES)
    except OSError as error:
        raise PluginError(
            f"{path}: the plugin file cannot be read ({error.strerror}). Restore it, or name it where it is now with "
            "--plugin FILE."
        ) from None
    if len(content) > _MAX_BYTES:
        raise PluginError(f"{path}: more than {_MAX_BYTES // 1000} kB are too many for a plugin file.")
    return content
