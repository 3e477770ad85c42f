"""Suites: a base recipe, a grid of changes to it, seeds; run cell by cell, then set beside a paper's numbers."""

from calfat_plugin.suites.suite import Suite, load_suite

__all__ = ["Suite", "load_suite"]
