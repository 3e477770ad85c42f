"""What the JSON files of a run directory hold, as far as a page needs it: a damaged one is named, not drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calfat_plugin.disk import RESTORE
from calfat_plugin.errors import RunError

# A shape is a type or several, a list with the shape of its entries, or a mapping: from keys to shapes, where one that
# ends in ? may be missing, or from `str` to the shape of every value. `object` is anything.
_NUMBER = (int, float)
_NUMBER_OR_NONE = (int, float, type(None))
_ATTACKED = {
    "label": str,
    "num_examples": int,
    "accuracy": _NUMBER,
    "accuracy_strict": _NUMBER,
    "settings": {str: object},
    "seconds": _NUMBER,
}
_EVALUATION = {
    **_ATTACKED,
    "per_class": [_NUMBER_OR_NONE],
    "per_class_strict": [_NUMBER_OR_NONE],
    "implementation": str,
    "details": {str: object},
}
_ALARMS = [{"code": str, "text": str}]
SHAPES: Mapping[str, Any] = {
    "results": {
        "evaluations?": [_EVALUATION],
        "alarms?": _ALARMS,
        "recipe?": str,
        "seconds?": _NUMBER,
        "test_selected?": {str: {"round": int, "evaluator": str, "accuracy": _NUMBER, "checkpoint": str}},
        "citations?": [{"text": str, "bibtex": str}],
    },
    "environment": {"command?": [str], "versions?": {str: (str, type(None))}, "plugins?": [str]},
    "partition": {"class_names": [str], "class_counts": [[int]]},
    "per_class": {
        "checkpoint": str,
        "round": int,
        "class_names": [str],
        "evaluators": [str],
        "methods": {str: [{"client": int, str: object}]},
    },
    "tsne": {
        "class_names": [str],
        "points": [[_NUMBER]],
        "labels": [int],
        "checkpoint": str,
        "round": int,
        "perplexity": _NUMBER,
        "seed": int,
    },
    "attacks": {
        "evaluations?": [_ATTACKED],
        "alarms?": _ALARMS,
        "checkpoint?": (str, type(None)),
        "round?": (int, type(None)),
    },
    "suite": {"title?": str, "cells?": [{"name": str, "runs?": [{"directory": str}]}]},
}


def check_shape(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """The content of a file, which holds what :data:`SHAPES` says for ``name``; empty is a file that is not there.

    Raises:
        RunError: with the key that is missing, of another type, or does not fit the others.
    """
    if content and (complaint := _mismatch(content, SHAPES[name], "") or _inconsistency(content, name)):
        raise RunError(f"{path}: {complaint}; the file is damaged or was changed by hand. {RESTORE}")
    return content


def _mismatch(value: Any, shape: Any, where: str) -> str:
    """What is wrong with a value, or an empty text."""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is a {type(value).__name__}, expected a list"
        found = (_mismatch(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), "")
    if isinstance(shape, dict):
        return _mismatch_of_mapping(value, shape, where)
    if shape is object or (isinstance(value, shape) and not isinstance(value, bool)):
        return ""
    wanted = shape if isinstance(shape, tuple) else (shape,)
    words = " or ".join("null" if kind is type(None) else kind.__name__ for kind in wanted)
    return f"{where} is a {type(value).__name__}, expected {words}"


def _mismatch_of_mapping(value: Any, shape: Mapping[Any, Any], where: str) -> str:
    if not isinstance(value, Mapping):
        return f"{where} is a {type(value).__name__}, expected a mapping"
    inside = f"{where}." if where else ""
    named = {key.rstrip("?"): (inner, key.endswith("?")) for key, inner in shape.items() if isinstance(key, str)}
    for key, (inner, optional) in named.items():
        if key not in value and not optional:
            return f"{inside}{key} is missing"
        if key in value and (complaint := _mismatch(value[key], inner, inside + key)):
            return complaint
    if str in shape:
        found = (_mismatch(value[key], shape[str], inside + key) for key in value.keys() - named.keys())
        return next(filter(None, found), "")
    return ""


def _inconsistency(content: Mapping[str, Any], name: str) -> str:
    """What does not fit together in a file of the right types, or an empty text."""
    classes = len(content["class_names"]) if "class_names" in content else 0
    if name == "per_class":
        for method, clients in content["methods"].items():
            for client, label in ((client, label) for client in clients for label in content["evaluators"]):
                if _mismatch(client.get(label), [_NUMBER_OR_NONE], "") or len(client[label]) != classes:
                    return f"methods.{method}: client {client['client']} has no {classes} values of {label}"
        if len({len(clients) for clients in content["methods"].values()}) != 1:
            return "methods: not one number of clients"
    if name == "tsne":
        points, labels = content["points"], content["labels"]
        if len(points) != len(labels) or any(len(point) != 2 for point in points):
            return f"points: expected {len(labels)} pairs, one for each label"
        if not all(0 <= label < classes for label in labels):
            return f"labels: expected 0 to {classes - 1}"
    if name == "partition" and any(len(row) != classes for row in content["class_counts"]):
        return f"class_counts: expected rows of {classes} numbers"
    return ""
