"""Data sets by name: images in [0, 1] and labels, whole in memory, with no hidden normalisation.

Importing this package loads neither torch nor torchvision nor scikit-learn; the loaders do.
"""

from calfat_plugin.datasets.data import NO_AUGMENTATION, Augmentation, Dataset, ImageData, pixels

__all__ = ["NO_AUGMENTATION", "Augmentation", "Dataset", "ImageData", "pixels"]
