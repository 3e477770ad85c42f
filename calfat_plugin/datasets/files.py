"""Find a published data set's files, check them, and say what to do where they are not right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError

from calfat_plugin.errors import DataError

DOWNLOAD_HINT = "run again with --download (recipe key calfat.dataset.download: true)"


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
    """

    name: str
    source: str
    downloads: tuple[str, ...]
    megabytes: int
    unpack_in: str
    folders: tuple[str, ...]
    md5: Mapping[str, str]
    fetch: Callable[[Path], object]

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

    def _checked(self, root: Path, verify: bool) -> Path:
        """The folder below ``root`` that holds most of the files, the first one among equals, if it is right."""
        candidates = [root / below for below in self.folders]
        folder = max(candidates, key=lambda folder: sum((folder / f).is_file() for f in self.md5))
        places = " or ".join(map(str, candidates))
        for file in self.md5:
            if not (folder / file).is_file():
                raise DataError(
                    f"data set {self.name}: {folder / file} is missing (looked in {places}). "
                    f"{self._by_hand(root)}, or {DOWNLOAD_HINT}."
                )
        for file, expected in self.md5.items() if verify else ():
            found = hashlib.md5((folder / file).read_bytes(), usedforsecurity=False).hexdigest()
            if found != expected:
                raise DataError(
                    f"data set {self.name}: {folder / file} is corrupt: its MD5 is {found}, "
                    f"the published one {expected}. Delete it and {DOWNLOAD_HINT}. "
                    f"By hand: {self._by_hand(root)}."
                )
        return folder

    def _by_hand(self, root: Path) -> str:
        unpacked = self.downloads[0] in self.md5
        these = "them" if len(self.downloads) > 1 else "it"
        return (
            f"Download {', '.join(self.downloads)} from {self.source} ({self.megabytes} MB) and "
            f"{'put' if unpacked else 'unpack'} {these} in {root / self.unpack_in}"
        )


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
