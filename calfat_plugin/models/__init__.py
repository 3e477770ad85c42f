"""Image classifiers. Importing this package loads torch."""

from calfat_plugin.models.base import ImageClassifier, Normalize
from calfat_plugin.models.cnn import CNN, CNNMcMahan, CNNSmall

__all__ = ["CNN", "CNNMcMahan", "CNNSmall", "ImageClassifier", "Normalize"]
