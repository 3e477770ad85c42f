"""Suites: a base recipe, a grid of changes to it, seeds; run cell by cell, then set beside a paper's numbers."""

from calfat_plugin.suites.parse import load_suite
from calfat_plugin.suites.schema import Suite

__all__ = ["Suite", "load_suite"]
