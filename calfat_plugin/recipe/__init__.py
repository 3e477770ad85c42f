"""Recipes: FedML's YAML sections plus a strict ``calfat:`` section; what their keys are, and where each is written."""

from calfat_plugin.recipe.document import Document, read_document

__all__ = ["Document", "read_document"]
