"""AutoAttack and its parts, by the official implementation."""

from calfat_plugin.evaluators.autoattack.autoattack import ENTRIES

__all__ = ["ENTRIES"]
