"""Robust aggregation: rules that bear some clients who send what they like. A file each, over ``base``."""
