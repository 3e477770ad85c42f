"""Writing that survives a crash, and errors of the disk in the user's words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from calfat_plugin.errors import RunError


@contextmanager
def telling_disk_errors(path: Path) -> Iterator[None]:
    """Reword what goes wrong while ``path`` is written: a full disk is the user's to mend, not a bug of ours.

    Raises:
        RunError: with the path and the system's reason.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(f"{path}: cannot be written ({reason}). Make room, or choose another --run-dir.") from None


def write_text(path: Path, text: str) -> None:
    """Write a file atomically and durably: after a crash there is the old file or the new one, never half of one.

    Raises:
        RunError: the disk refuses.
    """
    temporary = path.with_name(path.name + ".tmp")
    with telling_disk_errors(path):
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
