"""Image classifiers. Importing this package loads torch.

All are built as ``Model(in_channels, image_size, num_classes, **options)``.
"""

from calfat_plugin.models.base import ImageClassifier, Normalize
from calfat_plugin.models.building import model_from_factory, seeded
from calfat_plugin.models.cnn import CNN, CNNMcMahan, CNNSmall
from calfat_plugin.models.deep import VGG8, AlexNet64, AlexNet64Small, ResNet18

__all__ = [
    "CNN",
    "VGG8",
    "AlexNet64",
    "AlexNet64Small",
    "CNNMcMahan",
    "CNNSmall",
    "ImageClassifier",
    "Normalize",
    "ResNet18",
    "model_from_factory",
    "seeded",
]
