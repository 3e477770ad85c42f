"""Recipes: FedML's YAML sections plus a strict ``calfat:`` section, parsed once into frozen typed objects."""

from calfat_plugin.recipe.document import Document, read_document
from calfat_plugin.recipe.parse import parse_recipe
from calfat_plugin.recipe.schema import Choice, Recipe

__all__ = ["Choice", "Document", "Recipe", "parse_recipe", "read_document"]
