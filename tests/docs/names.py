"""Names that a page may use: keys of recipes, plugins, commands."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from calfat_plugin.registry import Registry
from tests.cli.runner import calfat
from tests.docs.pages import FENCE, text_of

BUILT_IN = Registry.load(entry_points=False)


def inline(page: str) -> list[str]:
    """Every inline code of a page, outside its fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))


@cache
def recipe_keys() -> frozenset[str]:
    """Dotted keys of a cross-silo recipe with every default, those of sections included."""
    silo = ("--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC")
    own = (
        *("--set", "calfat.threat.inner=n-fgsm"),  # the default is not written
        *("--set", "calfat.ema={decay: 0.5}"),
        *("--set", "calfat.silo.tls={ca: a.pem, cert: b.pem, key: c.key}"),
    )
    tailed = ("--set", "data_args.partition_method=longtail")
    checks = ((*silo, *own), tailed)
    return frozenset().union(
        *(_keys(json.loads(calfat("check", "calfat_digits", "--json", *each).out)["recipe"]) for each in checks)
    )


def _keys(section: dict[str, Any], below: str = "") -> frozenset[str]:
    nested = [_keys(value, f"{below}{key}.") for key, value in section.items() if isinstance(value, dict)]
    return frozenset(f"{below}{key}" for key in section).union(*nested)
