"""Files that survive a crash, locks that die with their process, and disk errors that say what to do."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calfat_plugin.errors import RunError

try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None  # type: ignore[assignment]

_LONGEST_FIELD = 2**31 - 1  # characters; the most that the library takes on every system


@contextmanager
def reporting_disk_errors(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Turn what goes wrong while ``path`` is written into an error for the user: a full disk is not a bug of ours.

    Args:
        path: what is written.
        also: further exceptions that mean the same.

    Raises:
        RunError: with the path and the system's reason.
    """
    refusals: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except refusals as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(f"{path}: cannot be written ({reason}). Make room, or choose another --run-dir.") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file atomically and durably: after a crash there is the old file or the new one, never half of one.

    Yields:
        The path to write to. It takes the place of ``path`` when the block ends without an error.
    """
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically and durably.

    Raises:
        RunError: the disk refuses.
    """
    with reporting_disk_errors(path), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def long_csv_fields() -> Iterator[None]:
    """Read CSV fields of any length; the library refuses those over 131,072 characters."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(handle: int) -> bool:
    """Claim an open file or folder until it is closed or the process ends; False if another process has it.

    Where there are no locks (Windows, some network file systems), everyone gets it.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a network file system without locks
        return True
    return True
