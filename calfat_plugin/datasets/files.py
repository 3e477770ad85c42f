"""Find a published data set's files, check them, and say what to do where they are not right."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError

from calfat_plugin.errors import DataError

DOWNLOAD_HINT = "run again with --download (recipe key calfat.dataset.download: true)"


@dataclass(frozen=True)
class SystemPackage:
    """A package of the operating system that holds a data set.

    Attributes:
        name: of Debian's package.
        folder: where it puts the files, below one of the system's data folders.
    """

    name: str
    folder: str

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the files are once it is installed: below the folders that freedesktop.org's XDG_DATA_DIRS names."""
        data_folders = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
        return tuple(Path(folder) / self.folder for folder in data_folders.split(os.pathsep) if folder)


@dataclass(frozen=True)
class PublishedFiles:
    """The files of one data set as its authors published them.

    Attributes:
        name: of the data set, as recipes spell it.
        source: web folder with the downloads, ending in a slash.
        downloads: the files to get from there.
        megabytes: their size together.
        unpack_in: folder below the data root that they belong in.
        folders: where the data files may lie below the data root; torchvision's own place first.
        md5: checksum of each data file, by its name in that folder.
        fetch: downloads the data set into the root given to it.
        package: a package of the operating system that brings the files, or None.

    A file may also be there compressed, with ``.gz`` after its name; its checksum is that of the content.
    """

    name: str
    source: str
    downloads: tuple[str, ...]
    megabytes: int
    unpack_in: str
    folders: tuple[str, ...]
    md5: Mapping[str, str]
    fetch: Callable[[Path], object]
    package: SystemPackage | None = None

    def seen(self, root: Path) -> Path | None:
        """The folder that holds all files, which are not read, or None. ``root``: data root; ``~`` is understood."""
        folder = self._fullest(root.expanduser())
        return folder if all(stored(folder, file).is_file() for file in self.md5) else None

    def locate(self, root: Path, *, verify: bool, download: bool) -> Path:
        """Return the folder that holds all files.

        Args:
            root: data root; ``~`` is understood.
            verify: compare every file with its checksum.
            download: fetch the data set, once, if files are missing or do not match.

        Raises:
            DataError: a file is missing or does not match, or the download failed.
        """
        root = root.expanduser()
        try:
            return self._checked(root, verify)
        except DataError:
            if not download:
                raise
        try:
            self.fetch(root)
        except (OSError, RuntimeError, EOFError, HTTPException, TarError) as error:
            raise DataError(
                f"data set {self.name}: the download failed ({type(error).__name__}: {error}). "
                f"Try again. By hand: {self._by_hand(root)}."
            ) from error
        return self._checked(root, verify)

    def _candidates(self, root: Path) -> list[Path]:
        return [*(root / below for below in self.folders), *(self.package.folders if self.package else ())]

    def _fullest(self, root: Path) -> Path:
        """The folder that holds most of the files, the first one among equals."""
        return max(self._candidates(root), key=lambda folder: sum(stored(folder, f).is_file() for f in self.md5))

    def _checked(self, root: Path, verify: bool) -> Path:
        """The fullest folder, if it is right."""
        folder = self._fullest(root)
        for file in self.md5:
            if not stored(folder, file).is_file():
                places = " or ".join(map(str, self._candidates(root)))
                raise DataError(
                    f"data set {self.name}: {folder / file} is missing (looked in {places}). "
                    f"{self._by_package()}{self._by_hand(root)}, or {DOWNLOAD_HINT}."
                )
        for file, expected in self.md5.items() if verify else ():
            path = stored(folder, file)
            with naming_file(self.name, path), uncompressed(path) as plain:
                found = hashlib.md5(plain.read_bytes(), usedforsecurity=False).hexdigest()
            if found != expected:
                raise DataError(
                    f"data set {self.name}: {path} is corrupt: its MD5 is {found}, "
                    f"the published one {expected}. {self._replace(folder, root)}."
                )
        return folder

    def _replace(self, folder: Path, root: Path) -> str:
        if self.package and folder in self.package.folders:
            return f"Install it again: apt-get install --reinstall {self.package.name}"
        return f"Delete it and {DOWNLOAD_HINT}. By hand: {self._by_hand(root)}"

    def _by_package(self) -> str:
        return f"On Debian and Ubuntu: apt-get install {self.package.name}. Elsewhere: " if self.package else ""

    def _by_hand(self, root: Path) -> str:
        unpacked = self.downloads[0].removesuffix(".gz") in self.md5
        these = "them" if len(self.downloads) > 1 else "it"
        return (
            f"Download {', '.join(self.downloads)} from {self.source} ({self.megabytes} MB) and "
            f"{'put' if unpacked else 'unpack'} {these} in {root / self.unpack_in}"
        )


def stored(folder: Path, file: str) -> Path:
    """Where ``file`` is in ``folder``: under its own name, or compressed where only that is there."""
    plain, compressed = folder / file, folder / f"{file}.gz"
    return compressed if compressed.is_file() and not plain.is_file() else plain


@contextmanager
def uncompressed(path: Path) -> Iterator[Path]:
    """A file with the content of ``path``: itself, or a temporary one if it is compressed (``.gz``)."""
    if path.suffix != ".gz":
        yield path
        return
    with tempfile.NamedTemporaryFile() as plain:
        with gzip.open(path) as content:
            shutil.copyfileobj(content, plain)
        plain.flush()
        yield Path(plain.name)


@contextmanager
def naming_file(name: str, path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while data set ``name`` reads ``path`` into a DataError naming it.

    Readers of pickles, .mat files and images raise nearly every exception there is on damaged
    content, hence the broad except; the cause stays chained.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"data set {name}: {path} cannot be read ({type(error).__name__}: {error}). "
            "It is damaged or not in the expected format; replace it."
        ) from error
