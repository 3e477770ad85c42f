"""Entries of the built-in data sets, models and partitions, with their options."""

from __future__ import annotations

from dataclasses import dataclass

from calfat_plugin.entries import Citation, DatasetEntry, ModelEntry, PartitionEntry
from calfat_plugin.options import option

# --- data sets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbeddedOptions:
    """Options of a data set that needs no files."""


DATASETS = (
    DatasetEntry(
        "digits",
        build="calfat_plugin.datasets:load_digits",
        config=EmbeddedOptions,
        summary="scikit-learn's bundled 8x8 handwritten digits: real data, no download",
        num_classes=10,
        image_shape=(1, 8, 8),
    ),
)

# --- models -----------------------------------------------------------------------------------------------------------

MODELS = (
    ModelEntry(
        "cnn",
        build="calfat_plugin.models:CNN",
        summary="three 3x3 convolutions of 128 channels, as in the CalFAT release; images of 18x18 and more",
    ),
    ModelEntry(
        "cnn_small",
        build="calfat_plugin.models:CNNSmall",
        summary="three padded 3x3 convolutions of 32 and 64 channels for small images such as digits",
    ),
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
)
