"""``evidence.safetensors``: evidence as a file, which may come from anybody."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.disk import OTHER_RUN_DIR, put_in_place, reporting_disk_errors, temporary_of
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.evidence import Evidence
from calfat_plugin.results import WORST_CASE
from calfat_plugin.tensor_files import DIGEST, READ_ERRORS, read_tensors, write_tensors

_FORMAT = 1
#: Name to type and axes; N test images, A attacks, M covered images, K adversarial ones, P shown ones of C x H x W.
_TENSORS: Mapping[str, tuple[torch.dtype, str]] = {
    "label": (torch.int64, "N"),
    "clean": (torch.int64, "N"),
    "tried": (torch.bool, "AN"),
    "broken": (torch.bool, "AN"),
    "covered": (torch.int64, "M"),
    "index": (torch.int64, "K"),
    "by": (torch.int64, "K"),
    "x_adv": (torch.float32, "KCHW"),
    "prediction": (torch.int64, "K"),
    "shown": (torch.int64, "P"),
    "x_shown": (torch.float32, "PCHW"),
}


def write_evidence(path: Path, evidence: Evidence, todo: str = OTHER_RUN_DIR) -> None:
    """Write atomically."""
    no_rows = torch.zeros((0, len(evidence.label)), dtype=torch.bool)
    tensors = {}
    for name in _TENSORS:
        value = getattr(evidence, name)
        if isinstance(value, Mapping):  # of an attack to a row of the table
            value = torch.stack([*value.values()]) if value else no_rows
        tensors[name] = value
    facts = {**evidence.facts, "format": _FORMAT, "attacks": evidence.attacks, "judged": [*evidence.tried]}
    with reporting_disk_errors(path, todo):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary_of(path), tensors, facts)
        put_in_place([path])


def read_evidence(path: Path) -> Evidence:
    """Read what :func:`write_evidence` wrote; nothing in the file is believed but the meaning of its numbers.

    Raises:
        RunError: there is no such file, or something in it cannot be: the text says what, and at which image.
    """
    try:
        tensors, facts = read_tensors(path)
        sizes = _sizes(path, tensors)
        if facts.get("format") != _FORMAT or DIGEST not in facts:
            raise RunError(f"{path}: not a file of evidence (no facts of format {_FORMAT} in its metadata).")
        attacks, judged = _names(facts["attacks"]), _names(facts["judged"])
    except FileNotFoundError:
        raise RunError(f"{path}: no such file.") from None
    except READ_ERRORS as error:
        raise RunError(f"{path}: the evidence cannot be read ({type(error).__name__}: {error}).") from None
    _check_values(path, tensors, sizes, attacks, judged)
    for name in ("data", "weights"):
        _refuse(path, name, isinstance(facts.get(name), str), "is no SHA-256")
    about = {key: value for key, value in facts.items() if key not in (DIGEST, "format", "attacks", "judged")}
    tried = dict(zip(judged, tensors.pop("tried"), strict=True))
    broken = dict(zip(judged, tensors.pop("broken"), strict=True))
    return Evidence(tried=tried, broken=broken, attacks=attacks, facts=about, **tensors)


def _check_values(
    path: Path,
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    attacks: tuple[str, ...],
    judged: tuple[str, ...],
) -> None:
    """Refuse positions and classes that cannot be."""
    _refuse(path, "tried", len(judged) == sizes["A"], f"has {sizes['A']} rows for the attacks {', '.join(judged)}")
    _refuse(path, "judged", set(judged) <= {*attacks, WORST_CASE}, "names an attack that is not among `attacks`")
    limits = {"covered": sizes["N"], "index": sizes["N"], "shown": sizes["N"], "by": len(attacks)}
    for name, limit in limits.items():
        values = tensors[name]
        outside = (values < 0) | (values >= limit)
        _refuse(path, name, not outside.any(), f"holds {_first(values, outside)}; expected 0 to {limit - 1}")
    for name in ("covered", "index", "shown"):
        values = tensors[name]
        falls = values.diff() <= 0
        _refuse(path, name, not falls.any(), f"is not ascending at {_first(values[1:], falls)}: twice the same image?")
    for name in ("label", "clean", "prediction"):
        below = tensors[name] < 0
        _refuse(path, name, not below.any(), f"holds {_first(tensors[name], below)}, which is no class")
    elsewhere = ~torch.isin(tensors["index"], tensors["covered"])
    image = _first(tensors["index"], elsewhere)
    _refuse(path, "index", not elsewhere.any(), f"has image {image}, which is not covered")


def _sizes(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Axis to length, of tensors that agree."""
    if set(tensors) != set(_TENSORS):
        names = ", ".join(sorted(tensors)) or "none"
        raise RunError(f"{path}: has the tensors {names}; expected {', '.join(_TENSORS)}.")
    sizes: dict[str, int] = {}
    for name, (dtype, axes) in _TENSORS.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.ndim != len(axes):
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise RunError(f"{path}: `{name}` is {got}; expected {dtype} ({', '.join(axes)}).")
        for axis, length in zip(axes, tensor.shape, strict=True):
            if sizes.setdefault(axis, length) != length:
                raise RunError(f"{path}: `{name}` has {length} where {axis} is {sizes[axis]} elsewhere in the file.")
    return sizes


def _names(value: Any) -> tuple[str, ...]:
    """Names of attacks as the file's facts have them."""
    are_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not are_names or len(set(value)) < len(value):
        raise ValueError("names of attacks are missing, or one is there twice")
    return tuple(value)


def _refuse(path: Path, name: str, fine: bool | Tensor, text: str) -> None:
    if not fine:
        raise RunError(f"{path}: `{name}` {text}. This is not what an evaluation writes.")


def _first(values: Tensor, where: Tensor) -> int:
    """The first of the values that are wrong, for the message about it; 0 where none is."""
    if not where.any():
        return 0
    return int(values[where][0])
