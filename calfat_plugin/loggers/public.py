"""What of a recipe may leave the run directory: sections that cannot hold a secret.

The host's communication and tracking sections may name brokers, keys and passwords (``tracking_args.wandb_key``), so
loggers and reports see a recipe through this list only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PUBLIC_SECTIONS = ("common_args", "data_args", "model_args", "train_args", "device_args", "calfat")


def public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of ``recipe`` that are safe to show, in their usual order."""
    return {section: recipe[section] for section in PUBLIC_SECTIONS if section in recipe}


def public_recipe_text(recipe: Mapping[str, Any]) -> str:
    """:func:`public_recipe` as YAML."""
    import yaml

    return yaml.safe_dump(public_recipe(recipe), sort_keys=False, width=120)
