"""Files that survive a crash, locks that die with their process, and disk errors that say what to do."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from calfat_plugin.errors import RunError

#: What to do about a file of a run that cannot be written.
OTHER_RUN_DIR = "Make room, or choose another --run-dir."
#: The same, where no option says where it goes.
TRY_AGAIN = "Make room, and try again with the same command."
#: What to do about a damaged file that a command can make again.
RESTORE = "Restore it from a copy, or remove it and make it again."
#: Numbers of the errors of a full disk, a full quota and a file that may not grow.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Numbers of the errors that say that a process, or the machine, has too many files open; and what to do.
TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
ALLOW_MORE = "Allow more open files, such as ulimit -n 1024."
#: Most bytes of a JSON file: a partition of ten thousand clients and a hundred classes has 12 MB.
LARGEST_JSON = 32_000_000
_MOST_SYNCS = 32  # threads


def expanded(path: str | Path) -> Path:
    """A path as a user writes it: ``~`` is the home directory, and stays as it is where nobody knows one."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises RuntimeError there


def state_folder() -> Path:
    """Where this user's programs keep what they learned, as freedesktop.org has it; ours need not be there yet."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return expanded(state) / "calfat-plugin"


class DiskError(RunError):
    """A file cannot be written."""


@contextmanager
def reporting_disk_errors(path: Path, todo: str = OTHER_RUN_DIR) -> Iterator[None]:
    """Turn what goes wrong while ``path`` is written into an error for the user: a full disk is not a bug of ours."""
    try:
        yield
    except OSError as error:
        remedy = todo
        if error.errno in TOO_MANY_OPEN:
            remedy = ALLOW_MORE
        raise DiskError(f"{path}: cannot be written ({error.strerror or error}). {remedy}") from None


def refuse_unwritable(folder: Path, todo: str, *, make: bool = False) -> None:
    """Refuse a folder that cannot be written to now, not after hours of work; ``make``: it need not be there yet."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to ({error.strerror}); {todo}") from None


def reserved(candidates: Iterator[Path]) -> Path:
    """The first path that did not exist, created empty, so that two commands never take the same."""
    for path in candidates:
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}).") from None
        return path
    raise RunError(f"{path}: this file exists already; results are never overwritten.")


def temporary_of(path: Path) -> Path:
    """Where the new content of a file is written, until it takes the file's place."""
    return path.with_name(path.name + ".tmp")


def put_in_place(paths: Sequence[Path], also: Collection[Path] = ()) -> None:
    """Rename files that were written as :func:`temporary_of`, one after the other.

    All content is on disk before the first name changes, that of the files in ``also``, too; and the names are on disk
    before this returns. Files are forced to disk at the same time, because each such wait takes milliseconds, however
    little was written.
    """
    sync_together([*also, *map(temporary_of, paths)])
    for path in paths:
        os.replace(temporary_of(path), path)
    sync_together({path.parent for path in paths})


def write_text(path: Path, text: str, todo: str = OTHER_RUN_DIR) -> None:
    """Write a text file atomically and durably: a crash leaves the old one or the new one, never half of one."""
    with reporting_disk_errors(path, todo):
        temporary = temporary_of(path)
        temporary.unlink(missing_ok=True)  # in a folder from elsewhere it may be a link, which writing would follow
        temporary.write_text(text, encoding="utf-8")
        put_in_place([path])


def write_json(path: Path, content: Mapping[str, Any], todo: str = OTHER_RUN_DIR) -> None:
    """The same of a JSON file; what JSON cannot hold is our bug: a ``TypeError``, of nan a ``ValueError``."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n", todo)


def write_new_folder(folder: Path, files: Mapping[str, str], if_there: str) -> None:
    """Write text files, and the folders that their names have, into a new folder: all of them, or none."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise RunError(f"{folder}: it is there already. {if_there}") from None
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}).") from None
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RunError(f"{folder}: cannot be written ({error.strerror}).") from None


def read_bytes(path: Path, limit: int, *, piped: bool = False) -> bytes:
    """The first ``limit + 1`` bytes of a file: more than ``limit`` says that there are more.

    Somebody else may have put the file there. A link to a device would never end, and a pipe would wait for ever, so
    anything but a regular file is an ``OSError``. ``piped``: the user has named it, so a device and a pipe are fine.
    """
    if piped:
        with path.open("rb") as file:
            return file.read(limit + 1)
    with opened_regular(path) as handle, os.fdopen(os.dup(handle), "rb") as file:
        return file.read(limit + 1)


def read_whole(path: Path, limit: int) -> bytes:
    """The content of a regular file; one of more than ``limit`` bytes is an ``OSError``, too."""
    content = read_bytes(path, limit)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
    return content


def sha256_of(path: Path) -> str:
    """Of a regular file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with opened_regular(path) as handle, os.fdopen(os.dup(handle), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def opened_regular(path: Path) -> Iterator[int]:
    """A handle on a regular file, or an ``OSError``."""
    # O_NONBLOCK: opening a pipe would wait for a writer, and not even Ctrl-C ends that.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a regular file", str(path))
        yield handle
    finally:
        os.close(handle)


def refuse_link(path: Path, what: str = "results are written") -> None:
    """Refuse to write to or below a link in a folder from elsewhere: it may lead anywhere."""
    if path.is_symlink():
        raise RunError(f"{path}: is a link, and {what} to no other place. Remove the link.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping; empty where there is no such file."""
    try:
        content = json.loads(read_whole(path, LARGEST_JSON).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason: str | None = str(error)
        if isinstance(error, OSError):
            reason = error.strerror
        raise RunError(f"{path}: cannot be read ({reason}). {RESTORE}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no JSON mapping; it was changed by hand. {RESTORE}")
    return content


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``parent`` that is removed at the end; what a killed process left behind is removed before."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError), opened(folder) as handle:
            if lock(handle):  # else a process that is alive works in it
                shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name, opened(Path(name)) as handle:
        lock(handle)
        yield Path(name)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A handle on a file or folder, for :func:`lock` and the like."""
    handle = os.open(folder, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place does not keep us waiting
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def staying_here() -> Iterator[None]:
    """Come back to the working directory at the end, whatever somebody else's code has changed it to."""
    with ExitStack() as at_end:
        with suppress(OSError):  # a folder that may be entered and not read
            at_end.callback(os.fchdir, at_end.enter_context(opened(Path())))
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; wait while another process holds it, except where there are no locks (:func:`lock`)."""
    with opened(folder) as handle:  # locking a folder leaves nothing behind
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    with opened(path) as handle:
        os.fsync(handle)


def sync_together(paths: Collection[Path]) -> None:
    """Force files and folders to disk at the same time, which takes hardly longer than one of them alone."""
    with ThreadPoolExecutor(min(len(paths), _MOST_SYNCS)) as threads:
        for _ in threads.map(sync, paths):  # raises what a thread raised
            pass


def lock(handle: int) -> bool:
    """Claim an open file or folder until it is closed or the process ends; False if another process has it.

    Where there are no locks (some network file systems), everyone gets it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
