"""Files of named tensors with facts beside them: safetensors, without pickle, with a digest of it all.

A byte that a disk or a copy changed is found when the file is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.disk import opened_regular
from calfat_plugin.errors import RunError

#: What reading a file that we did not write, or that was damaged, may raise.
READ_ERRORS = (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError)
#: What to do about one.
REMEDY = "Restore it from a copy, or start the run again in another directory."
#: The key of the file's metadata that is ours.
KEY = "calfat"
DIGEST = "sha256"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """Write a file, in place where it is there already, and return its digest; tensors may share memory."""
    from safetensors.torch import save  # here, not above: a model is measured where it is not installed, too

    copies = apart(tensors)
    digest = digest_of(copies, facts)
    if path.is_symlink() or not path.is_file():  # of a run directory from elsewhere: a link, or a pipe that waits
        path.unlink(missing_ok=True)
    # One key, because the format writes several in no fixed order: the same run shall give the same bytes.
    # Not the library's save_file, which writes a temporary file beside ``path`` that a kill leaves behind.
    path.write_bytes(save(copies, {KEY: json.dumps({**facts, DIGEST: digest})}))
    return digest


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of a file; the facts of one that we did not write are empty."""
    facts = read_facts(path)
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    written = facts.get(DIGEST)
    if written is not None and written != digest_of(tensors, {key: facts[key] for key in facts if key != DIGEST}):
        raise RunError(f"{path}: the file is damaged: its content is not what was written (SHA-256). {REMEDY}")
    return tensors, facts


def read_facts(path: Path) -> dict[str, Any]:
    """The facts alone, which are not checked against the digest; errors as of :func:`read_tensors`."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
    facts: dict[str, Any] = json.loads(metadata.get(KEY, "{}"))
    return facts


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        refuse_endless(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def refuse_endless(path: Path) -> None:
    """Refuse a device, a pipe, and a file that this machine's memory cannot hold: they would hang or kill us."""
    if not path.exists():
        return  # whoever opens it says so
    try:
        with opened_regular(path) as handle:
            size = os.fstat(handle).st_size
    except OSError as error:
        raise ValueError(error.strerror) from None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(f"its {size:,} bytes are more than this machine's memory of {memory:,}")


def digest_of(tensors: Mapping[str, Tensor], facts: Any = None) -> str:
    """SHA-256 of the facts, and of names, types, shapes and bytes of the tensors."""
    digest = hashlib.sha256()
    if facts is not None:
        digest.update(json.dumps(facts).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and none sharing memory with another, which the format forbids."""
    separate: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        if address in addresses:
            tensor = tensor.clone()
        separate[name] = tensor
        addresses.add(address)
    return separate
