"""``partition.json``: which data a run trains on, so that a resume can see whether they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calfat_plugin.datasets import Dataset, ImageData


def describe_data(dataset: Dataset, shards: Mapping[int, ImageData]) -> dict[str, Any]:
    """The content of ``partition.json``.

    Args:
        dataset: whole.
        shards: client id to its training examples, ascending.
    """
    return {
        "class_names": list(dataset.class_names),
        "class_counts": class_counts(dataset, shards),
        "dataset_sha256": _digest(filter(None, (dataset.train, dataset.test, dataset.validation))),
        "partition_sha256": _digest(shards.values()),
    }


def class_counts(dataset: Dataset, shards: Mapping[int, ImageData]) -> list[list[int]]:
    """Training examples: a row a client, a column a class."""
    return [shard.y.bincount(minlength=dataset.num_classes).tolist() for shard in shards.values()]


def _digest(parts: Iterable[ImageData]) -> str:
    """SHA-256 of images and labels, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        for tensor in (part.x, part.y):
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()
