"""Who holds which training examples: labels + number of clients + seed -> one index array a client.

Pure functions over numpy's legacy generator, whose streams are frozen across numpy versions: a seed means the same
partition for ever. All of them assign every index exactly once unless they say otherwise.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from calfat_plugin.errors import DataError

IndexArray = npt.NDArray[np.int64]
"""Positions in the training set, shape (num_examples of one client,)."""


def dirichlet(
    labels: npt.ArrayLike,
    num_clients: int,
    *,
    alpha: float,
    seed: int,
    min_size: int = 10,
    max_tries: int = 1000,
    balanced: bool = True,
) -> list[IndexArray]:
    """Label skew by Dirichlet draws, balanced: the procedure behind the published CalFAT numbers.

    Class by class the examples are dealt out in proportions drawn from Dir(alpha), but a client that already holds its
    even share of all examples gets none of the next class; the whole deal is repeated until every client holds
    ``min_size`` examples. This is the "noniid-labeldir" of NIID-Bench (Li et al. 2022, arXiv 2102.02079), with its
    random stream consumed in exactly the same order, so that seed 2021 gives the partition of the CalFAT release.
    ``alpha`` is the concentration, the paper's beta: small means few classes a client.
    """
    array = _checked(labels, num_clients, min_size)
    rng = np.random.RandomState(seed)
    by_class = [np.flatnonzero(array == label) for label in range(int(array.max()) + 1)]
    even_share = None
    if balanced:
        even_share = len(array) / num_clients
    return _deal_until_all_have(min_size, by_class, num_clients, alpha, rng, even_share, max_tries=max_tries, seed=seed)


#: Dirichlet shares as the CalFAT paper words them, without balancing: clients differ much more in size.
dirichlet_plain = partial(dirichlet, min_size=1, balanced=False)


def longtail(
    labels: npt.ArrayLike,
    num_clients: int,
    *,
    alpha: float,
    seed: int,
    imbalance: float = 100.0,
    min_size: int = 1,
    max_tries: int = 1000,
) -> list[IndexArray]:
    """A long tail over all clients (Cui et al. 2019, CIFAR-10-LT), then Dirichlet shares without balancing.

    Class c of C keeps n_max imbalance^(-c/(C-1)) random examples, rounded down, at least one: class 0 is the head.
    n_max is the largest number for which every class has as many; with equal classes, all of class 0.
    """
    array = _checked(labels, num_clients, min_size)
    rng = np.random.RandomState(seed)
    classes = [np.flatnonzero(array == label) for label in np.unique(array)]
    shares = [imbalance ** (-rank / max(1, len(classes) - 1)) for rank in range(len(classes))]
    n_max = min(len(members) / share for members, share in zip(classes, shares, strict=True))
    by_class = []
    for members, share in zip(classes, shares, strict=True):
        size = max(1, int(n_max * share))
        by_class.append(rng.permutation(members)[:size])
    remark = f" that imbalance {imbalance:g} leaves"
    _checked(array[np.concatenate(by_class)], num_clients, min_size, remark)
    return _deal_until_all_have(
        min_size, by_class, num_clients, alpha, rng, None, max_tries=max_tries, seed=seed, remark=remark
    )


def _deal_until_all_have(
    min_size: int,
    by_class: list[IndexArray],
    num_clients: int,
    alpha: float,
    rng: np.random.RandomState,
    even_share: float | None,
    *,
    max_tries: int,
    seed: int,
    remark: str = "",
) -> list[IndexArray]:
    """Deal again until every client has ``min_size`` examples; an error tells the seed and the remark."""
    best = 0
    for _ in range(max_tries):  # on purpose without reseeding: each try continues the same stream
        parts = _deal_once(by_class, num_clients, alpha, rng, even_share)
        smallest = min((len(part) for part in parts), default=0)
        if parts and smallest >= min_size:
            for part in parts:
                rng.shuffle(part)
            return parts
        best = max(best, smallest)
    raise DataError(
        f"no split in {max_tries} tries gave each of {num_clients} clients {min_size} of the "
        f"{sum(map(len, by_class))} examples{remark} (alpha {alpha}, seed {seed}; in the best try one client had "
        f"{best}). Raise alpha or max_tries, or lower min_size or the number of clients."
    )


def iid(labels: npt.ArrayLike, num_clients: int, *, seed: int) -> list[IndexArray]:
    """Deal all examples out at random; sizes differ by at most one."""
    num_examples = len(_checked(labels, num_clients, min_size=1))
    order = np.random.RandomState(seed).permutation(num_examples).astype(np.int64)
    return [part.copy() for part in np.array_split(order, num_clients)]


def label_shards(labels: npt.ArrayLike, num_clients: int, *, k: int, seed: int) -> list[IndexArray]:
    """``label<k>``: sort by label, cut into equal shards, deal k random ones to each client.

    A client therefore sees about k classes (McMahan et al. 2017, section 3, used k = 2). There are num_clients * k
    shards; the remainder of the division, less than one example a shard, is left out.
    """
    array = _checked(labels, num_clients, min_size=k)
    shard_count = num_clients * k
    shard_size = len(array) // shard_count
    by_label = np.argsort(array, kind="stable").astype(np.int64)
    shards = by_label[: shard_count * shard_size].reshape(shard_count, shard_size)
    dealt = np.random.RandomState(seed).permutation(shard_count).reshape(num_clients, k)
    return [shards[shards_of_client].reshape(-1) for shards_of_client in dealt]


def _deal_once(
    by_class: list[IndexArray], num_clients: int, alpha: float, rng: np.random.RandomState, even_share: float | None
) -> list[IndexArray]:
    """Deal all examples, class by class; with an ``even_share``, clients that hold as many get none of the next class.

    Returns an empty list where no client can take the next class.
    """
    hands: list[list[IndexArray]] = [[] for _ in range(num_clients)]
    sizes = np.zeros(num_clients, dtype=np.int64)
    for members in by_class:
        order = members.copy()
        rng.shuffle(order)
        proportions = rng.dirichlet(np.repeat(alpha, num_clients))
        if even_share is not None:
            proportions = proportions * (sizes < even_share)
            # Only here: a plain draw sums to 1 but for rounding, which dividing would shift.
            proportions = proportions / (proportions.sum() or 1.0)
        if len(order) == 0:
            continue
        if not proportions.any() or not np.isfinite(proportions).all():
            return []  # every open client drew 0, or a tiny alpha underflowed to 0/0
        cuts = (np.cumsum(proportions) * len(order)).astype(np.int64)[:-1]
        for client, piece in enumerate(np.split(order, cuts)):
            hands[client].append(piece)
            sizes[client] += len(piece)
    return [np.concatenate(hand) for hand in hands]


def silo(labels: npt.ArrayLike, num_clients: int) -> list[IndexArray]:
    """Data that lies with the parties cannot be split by one of them."""
    raise DataError(
        "partition_method: silo leaves the data with the parties of a cross-silo run; there is nothing to split here."
    )


def _checked(labels: npt.ArrayLike, num_clients: int, min_size: int, remark: str = "") -> IndexArray:
    """The labels as an array, of which there must be enough; labels and options were checked when they were read."""
    array = np.asarray(labels, dtype=np.int64)
    if num_clients * min_size > len(array):
        raise DataError(
            f"cannot give {num_clients} clients at least {min_size} each of {len(array)} training examples{remark}. "
            "Lower the number of clients or take a larger data set."
        )
    return array
