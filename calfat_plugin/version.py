"""The version of this package, in a module that imports nothing, so that every layer can name it."""

__version__ = "0.1.0"
"""The version of this package, a text."""
