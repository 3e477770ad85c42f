"""Data sets by name: images in [0, 1] and labels, whole in memory, with no hidden normalisation.

Importing this package loads neither torch nor torchvision nor scikit-learn; the loaders do.
"""

from calfat_plugin.datasets.data import NO_AUGMENTATION, Augmentation, Dataset, ImageData, pixels
from calfat_plugin.datasets.digits import load_digits
from calfat_plugin.datasets.folders import (
    imagenet_subset_classes,
    load_image_folder,
    load_imagenet_subset,
)
from calfat_plugin.datasets.published import (
    load_cifar10,
    load_cifar100,
    load_fmnist,
    load_mnist,
    load_svhn,
)

__all__ = [
    "NO_AUGMENTATION",
    "Augmentation",
    "Dataset",
    "ImageData",
    "imagenet_subset_classes",
    "load_cifar10",
    "load_cifar100",
    "load_digits",
    "load_fmnist",
    "load_image_folder",
    "load_imagenet_subset",
    "load_mnist",
    "load_svhn",
    "pixels",
]
