"""What the files that a report reads hold: checked once, so that pages meet no value that they cannot show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from calfat_plugin.disk import RESTORE
from calfat_plugin.errors import RunError
from calfat_plugin.exact import parse_number
from calfat_plugin.options import describe

#: A :class:`Kind`; a list of one shape; or a mapping from key to shape, where ``key?`` may be absent or null, and ``*``
#: is any other key, which else may hold anything.
Shape = Any


class Kind(NamedTuple):
    """A kind of value: what is expected, in words, and whether a value is one."""

    wanted: str
    holds: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _exact(value: Any) -> bool:
    try:
        return float(parse_number(value)) >= 0
    except (ValueError, OverflowError):
        return False


ANYTHING = Kind("", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number, 0 or more", lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63)
NUMBER = Kind("a number", lambda value: _number(value) and abs(value) < 1e15)
FRACTION = Kind("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
OPTIONAL_FRACTION = Kind(
    "a number from 0 to 1, or null", lambda value: value is None or (_number(value) and 0 <= value <= 1)
)
METRIC = Kind("a number, or null", lambda value: value is None or _number(value))
EPS = Kind("a number such as 8/255", _exact)

_WORST = {"accuracy": FRACTION, "ids": [COUNT]}
_EVALUATION = {
    "label": TEXT,
    "accuracy": OPTIONAL_FRACTION,  # null where the attack did not run
    "accuracy_release?": FRACTION,
    "not_run?": TEXT,
    "guess?": FRACTION,
    "num_examples?": COUNT,
    "per_class?": [OPTIONAL_FRACTION],
    "settings?": {"eps?": EPS, "norm?": TEXT},
    "seconds?": NUMBER,
    "metrics?": {"*": METRIC},
    "worst_class?": _WORST,
    "worst_clients?": _WORST,
    **dict.fromkeys(("head?", "middle?", "tail?"), _WORST),
}
_ALARMS = [{"code": TEXT, "text": TEXT, "labels": [TEXT]}]
_SELECTED = {"evaluator": TEXT, "accuracy": FRACTION, "round": COUNT}
_STOP = {"round": COUNT, "patience": COUNT, "evaluator": TEXT, "best_round": COUNT, "accuracy": FRACTION}
EVIDENCE = [{"file": TEXT, "norm": TEXT, "eps": TEXT}]
RESULTS = {
    "format?": COUNT,
    "recipe?": TEXT,
    "stopped_early?": _STOP,
    "metrics?": {"*": METRIC},
    "evaluations?": [_EVALUATION],
    "alarms?": _ALARMS,
    "citations?": [{"text": TEXT, "bibtex?": TEXT}],
    "test_selected?": {"*": _SELECTED},
    "validation_selected?": {"*": _SELECTED},
}
ENVIRONMENT = {"command?": [ANYTHING], "versions?": {}, "plugins?": [ANYTHING], "plugins_not_loaded?": [ANYTHING]}
_SPANS = [{"path": [TEXT], "seconds": NUMBER, "calls": COUNT}]
_PART = {"name": TEXT, "seconds": NUMBER, "spans": _SPANS}
PROFILE = {"method?": TEXT, "parts": [_PART]}
PARTITION = {"class_names?": [TEXT], "class_counts?": [[COUNT]], "groups?": {"*": [COUNT]}, "attackers?": [COUNT]}
ATTACKS = {
    "format?": COUNT,
    "checkpoint?": TEXT,
    "round?": COUNT,
    "selected_on?": TEXT,
    "evaluations?": [{**_EVALUATION, "num_examples": COUNT, "settings": _EVALUATION["settings?"]}],
    "alarms?": _ALARMS,
}
_ROW = {"attack": TEXT, "eps": EPS, "accuracy": FRACTION, "left?": FRACTION, "examples": COUNT, "seconds": NUMBER}
TRUST = {
    "attack": TEXT,
    "checkpoint?": TEXT,
    "round?": COUNT,
    "examples": COUNT,
    "finished": FLAG,
    "threat": {"norm": TEXT, "eps": EPS},
    "verdict": {
        **dict.fromkeys(("word", "text", "sentence"), TEXT),
        "causes": [TEXT],
        "natural?": FRACTION,
        "worst?": FRACTION,
        "usable?": FLAG,
    },
    "checks": [{"check": TEXT, "rows": [_ROW]}],
}
SUITE = {
    "title?": TEXT,
    "axes?": [{"name": TEXT}],
    "metrics?": [{"label": TEXT, "heading": TEXT}],
    "cells?": [
        {
            "name": TEXT,
            "source?": TEXT,
            "scores?": {"*": {"reported?": FRACTION}},
            "runs?": [{"directory": TEXT, "status?": TEXT}],
            "choice?": {"text": TEXT, "tried": TEXT, "remarks?": [TEXT]},
        }
    ],
    "choose?": {"how": TEXT},
    "tolerance_points?": {"*": NUMBER},
}


def check_shape(value: Any, shape: Shape, path: Path, where: str = "") -> None:
    """Refuse a file's content that is something else; ``where``: its part, such as ``evaluations[0].accuracy``.

    Removes nulls in the place of what may be absent, so that no reader meets one.
    """
    if isinstance(shape, list):
        if not isinstance(value, list):
            damaged(path, where, f"is {describe(value)}, expected a list")
        for index, item in enumerate(value):
            check_shape(item, shape[0], path, f"{where}[{index}]")
    elif isinstance(shape, Mapping):
        if not isinstance(value, dict):
            damaged(path, where, f"is {describe(value)}, expected a mapping")
        others = value.keys() - {key.removesuffix("?") for key in shape}
        for key, of_key in shape.items():
            for name in others if key == "*" else [key.removesuffix("?")]:
                if name not in value and name == key:
                    damaged(path, where, f"has no '{name}'")
                if key.endswith("?") and value.get(name, key) is None:
                    del value[name]
                elif name in value:
                    check_shape(value[name], of_key, path, f"{where}.{name}".removeprefix("."))
    elif not shape.holds(value):
        damaged(path, where, f"is {describe(value)}, expected {shape.wanted}")


def damaged(path: Path, where: str, what: str) -> NoReturn:
    """Refuse a file."""
    place = f"{where} " if where else "the file "
    raise RunError(f"{path}: {place}{what}. The file is damaged or was changed by hand. {RESTORE}")
