"""Entries of the built-in partitions, with their options."""

from __future__ import annotations

from dataclasses import dataclass

from calfat_plugin.entries import PartitionEntry, paper
from calfat_plugin.options import option
from calfat_plugin.recipe.silo import SILO


@dataclass(frozen=True)
class PartitionOptions:
    """Options that every partition has."""

    seed: int | None = option(
        None,
        low=0,
        high=2**32 - 1,
        help="seed of the split, which runs with other seeds then share; null: the run's seed",
    )


@dataclass(frozen=True)
class DirichletOptions(PartitionOptions):
    """Options of the release's Dirichlet partition."""

    min_size: int = option(10, low=1, help="repeat the draw until every client has this many examples")
    max_tries: int = option(1000, low=1, help="give up after this many tries")


@dataclass(frozen=True)
class PlainDirichletOptions(DirichletOptions):
    """Options of the plain Dirichlet partition."""

    min_size: int = option(1, low=1, help="repeat the draw until every client has this many examples")


@dataclass(frozen=True)
class LongTailOptions(PlainDirichletOptions):
    """Options of the long-tailed partition."""

    imbalance: float = option(100.0, low=1, help="examples of the first class for each one of the last: rho")


@dataclass(frozen=True)
class ShardOptions(PartitionOptions):
    """Options of the shard partition."""

    k: int = option(2, low=1, help="shards per client; label2 is k = 2")


ENTRIES = (
    PartitionEntry(
        "dirichlet",
        build="calfat_plugin.partitions.split:dirichlet",
        config=DirichletOptions,
        summary="label skew as in the CalFAT release: Dirichlet shares, capped and retried",
        formula="p^y ~ Dir(alpha), a client that holds N/m examples gets no more",
        citation=paper("li2022federated"),
        uses_alpha=True,
    ),
    PartitionEntry(
        "dirichlet_plain",
        build="calfat_plugin.partitions.split:dirichlet_plain",
        config=PlainDirichletOptions,
        summary="label skew as described in the CalFAT paper: plain Dirichlet shares",
        formula="p^y ~ Dir(alpha)",
        uses_alpha=True,
    ),
    PartitionEntry(
        "longtail",
        build="calfat_plugin.partitions.split:longtail",
        config=LongTailOptions,
        summary="a long tail over all clients, the first class its head, then plain Dirichlet shares: CIFAR-10-LT",
        formula="n_c = n_max rho^(-c/(C-1)), then p^y ~ Dir(alpha)",
        citation=paper("cui2019class"),
        uses_alpha=True,
        may_leave_out=True,
        long_tailed=True,
    ),
    PartitionEntry(
        "iid",
        build="calfat_plugin.partitions.split:iid",
        config=PartitionOptions,
        summary="a random permutation cut into equal parts",
    ),
    PartitionEntry(
        "label",
        build="calfat_plugin.partitions.split:label_shards",
        config=ShardOptions,
        summary="sorted by label, cut into shards, k random shards per client: label2",
        number_option="k",
        may_leave_out=True,  # the remainder of the division into shards
    ),
    PartitionEntry(
        SILO,
        build="calfat_plugin.partitions.split:silo",
        summary="no split: each party of a cross-silo run reads its own data_args.data_cache_dir; {rank} is its rank",
    ),
)
