"""Entries of the built-in data sets, models and partitions, with their options."""

from __future__ import annotations

from dataclasses import dataclass

from calfat_plugin.entries import Citation, DatasetEntry, ModelEntry, PartitionEntry
from calfat_plugin.options import NoOptions, option
from calfat_plugin.recipe.silo import SILO

# --- data sets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DownloadOptions:
    """Options of a data set that its publisher offers for download."""

    download: bool = option(False, help="fetch missing files from the publisher into data_args.data_cache_dir")
    verify: bool = option(True, help="compare files with the published checksums; false reads any file of the format")


@dataclass(frozen=True)
class SubsetOptions:
    """Options of the ImageNet subset."""

    size: int = option(64, low=8, help="height and width that images are brought to", unit="pixels")


@dataclass(frozen=True)
class FolderOptions(SubsetOptions):
    """Options of images in class folders."""

    channels: int = option(3, low=1, high=3, help="1 for grey images, 3 for colour")
    crop_padding: int = option(0, low=0, help="random crop of training images after padding", unit="pixels")
    flip: bool = option(False, help="mirror training images left-right at random")
    classes: str | None = option(
        None,
        help="class folders in the order of their labels, separated by commas, which all parties of partition_method: "
        "silo have to agree on; null: the folders below train, sorted",
    )


def _published(
    name: str, summary: str, num_classes: int, image_shape: tuple[int, int, int], citation: Citation
) -> DatasetEntry:
    return DatasetEntry(
        name,
        build=f"calfat_plugin.datasets:load_{name}",
        config=DownloadOptions,
        summary=summary,
        citation=citation,
        num_classes=num_classes,
        image_shape=image_shape,
    )


_CIFAR = Citation(
    "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    """@techreport{krizhevsky2009learning,
  title       = {Learning Multiple Layers of Features from Tiny Images},
  author      = {Krizhevsky, Alex},
  institution = {University of Toronto},
  year        = {2009}
}""",
)
_SVHN = Citation(
    "Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, 2011",
    """@inproceedings{netzer2011reading,
  title     = {Reading Digits in Natural Images with Unsupervised Feature Learning},
  author    = {Netzer, Yuval and Wang, Tao and Coates, Adam and Bissacco, Alessandro and Wu, Bo and Ng, Andrew Y.},
  booktitle = {NIPS Workshop on Deep Learning and Unsupervised Feature Learning},
  year      = {2011}
}""",
)
_MNIST = Citation(
    "LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998",
    """@article{lecun1998gradient,
  title   = {Gradient-Based Learning Applied to Document Recognition},
  author  = {LeCun, Yann and Bottou, L{\'e}on and Bengio, Yoshua and Haffner, Patrick},
  journal = {Proceedings of the IEEE},
  volume  = {86},
  number  = {11},
  pages   = {2278--2324},
  year    = {1998}
}""",
)
_FMNIST = Citation(
    "Xiao et al., Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017",
    """@article{xiao2017fashion,
  title   = {Fashion-{MNIST}: a Novel Image Dataset for Benchmarking Machine Learning Algorithms},
  author  = {Xiao, Han and Rasul, Kashif and Vollgraf, Roland},
  journal = {arXiv:1708.07747},
  year    = {2017}
}""",
)
_IMAGENET = Citation(
    "Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, 2015",
    """@article{russakovsky2015imagenet,
  title   = {{ImageNet} Large Scale Visual Recognition Challenge},
  author  = {Russakovsky, Olga and Deng, Jia and Su, Hao and Krause, Jonathan and Satheesh, Sanjeev and others},
  journal = {International Journal of Computer Vision},
  volume  = {115},
  number  = {3},
  pages   = {211--252},
  year    = {2015}
}""",
)

DATASETS = (
    DatasetEntry(
        "digits",
        build="calfat_plugin.datasets:load_digits",
        summary="scikit-learn's bundled 8x8 handwritten digits: real data, no download",
        num_classes=10,
        image_shape=(1, 8, 8),
    ),
    _published("cifar10", "50,000 + 10,000 colour images of 10 classes", 10, (3, 32, 32), _CIFAR),
    _published("cifar100", "50,000 + 10,000 colour images of 100 classes", 100, (3, 32, 32), _CIFAR),
    _published("svhn", "73,257 + 26,032 house numbers, without the 'extra' split", 10, (3, 32, 32), _SVHN),
    _published("mnist", "60,000 + 10,000 handwritten digits", 10, (1, 28, 28), _MNIST),
    _published("fmnist", "60,000 + 10,000 pieces of clothing", 10, (1, 28, 28), _FMNIST),
    DatasetEntry(
        "imagenet_subset",
        build="calfat_plugin.datasets:load_imagenet_subset",
        config=SubsetOptions,
        summary="12 classes of ImageNet from class folders; our own choice of classes, the paper lists none",
        citation=_IMAGENET,
        num_classes=12,
    ),
    DatasetEntry(
        "image_folder",
        build="calfat_plugin.datasets:load_image_folder",
        config=FolderOptions,
        summary="your own images: train/<class>/ and test/<class>/ folders",
        per_party=True,
    ),
)

# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddingOptions:
    """Options of McMahan's network."""

    padding: int = option(0, low=0, help="padding of its 5x5 convolutions; 2 is McMahan's MNIST network", unit="pixels")


@dataclass(frozen=True)
class BatchNormOptions:
    """Options of VGG-8."""

    batch_norm: bool = option(True, help="batch normalisation after every convolution")


@dataclass(frozen=True)
class DropoutOptions:
    """Options of the AlexNets."""

    dropout: float = option(0.5, low=0, high=1, help="dropout before the hidden layers; always off in attacks")


def _model(name: str, build: str, summary: str, config: type = NoOptions) -> ModelEntry:
    return ModelEntry(name, build=f"calfat_plugin.models:{build}", config=config, summary=summary)


MODELS = (
    _model("cnn", "CNN", "three 3x3 convolutions of 128 channels, as in the CalFAT release; images of 18x18 and more"),
    _model("cnn_small", "CNNSmall", "small padded 3x3 convolutions for small images such as digits"),
    _model("cnn_mcmahan", "CNNMcMahan", "two 5x5 convolutions and a hidden layer of 512", PaddingOptions),
    _model("vgg8", "VGG8", "five 3x3 convolutions, 64 to 512 channels", BatchNormOptions),
    _model("resnet18", "ResNet18", "ResNet-18 for 32x32 images"),
    _model("alexnet64", "AlexNet64", "torchvision's AlexNet on 64x64 images", DropoutOptions),
    _model("alexnet64_small", "AlexNet64Small", "a narrow AlexNet for 64x64 images, far cheaper", DropoutOptions),
)

# --- partitions -------------------------------------------------------------------------------------------------------

_NIID = Citation(
    "Li et al., Federated Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022",
    """@inproceedings{li2022federated,
  title     = {Federated Learning on Non-{IID} Data Silos: An Experimental Study},
  author    = {Li, Qinbin and Diao, Yiqun and Chen, Quan and He, Bingsheng},
  booktitle = {IEEE International Conference on Data Engineering},
  year      = {2022}
}""",
)


@dataclass(frozen=True)
class PartitionOptions:
    """Options that every partition has."""

    seed: int | None = option(
        2021,
        low=0,
        high=2**32 - 1,
        help="seed of the split, apart from the run's seed so that seeds compare on one split; null: the run's seed",
    )


@dataclass(frozen=True)
class DirichletOptions(PartitionOptions):
    """Options of the release's Dirichlet partition."""

    min_size: int = option(10, low=1, help="try again until every client has this many examples")
    max_tries: int = option(1000, low=1, help="give up after this many tries")


@dataclass(frozen=True)
class PlainDirichletOptions(PartitionOptions):
    """Options of the plain Dirichlet partition."""

    min_size: int = option(1, low=1, help="try again until every client has this many examples")
    max_tries: int = option(1000, low=1, help="give up after this many tries")


@dataclass(frozen=True)
class ShardOptions(PartitionOptions):
    """Options of the shard partition."""

    k: int = option(2, low=1, help="shards a client gets; label2 is k = 2")


PARTITIONS = (
    PartitionEntry(
        "dirichlet",
        build="calfat_plugin.partition:dirichlet",
        config=DirichletOptions,
        summary="label skew as in the CalFAT release: Dirichlet shares, capped and retried",
        formula="p^y ~ Dir(alpha), a client that holds N/m examples gets no more",
        citation=_NIID,
        uses_alpha=True,
    ),
    PartitionEntry(
        "dirichlet_plain",
        build="calfat_plugin.partition:dirichlet_plain",
        config=PlainDirichletOptions,
        summary="label skew as the CalFAT paper words it: plain Dirichlet shares",
        formula="p^y ~ Dir(alpha)",
        uses_alpha=True,
    ),
    PartitionEntry(
        "iid",
        build="calfat_plugin.partition:iid",
        config=PartitionOptions,
        summary="a random permutation cut into equal parts",
    ),
    PartitionEntry(
        "label",
        build="calfat_plugin.partition:label_shards",
        config=ShardOptions,
        summary="sorted by label, cut into shards, k random shards a client: label2",
        number_option="k",
    ),
    PartitionEntry(
        SILO,
        build="calfat_plugin.partition:silo",
        summary="no split: across silos each party reads its own data_args.data_cache_dir, where {rank} is its rank",
    ),
)
