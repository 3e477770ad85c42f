"""t-SNE of penultimate features (methods.md 12.3, figure 6 of the paper), kept as ``tsne.json`` for the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin import __version__
from calfat_plugin.disk import TRY_AGAIN, refuse_unwritable, write_text
from calfat_plugin.errors import ModelError
from calfat_plugin.report.reading import TSNE
from calfat_plugin.runs.loaded_run import IN_THE_RUN, LAST, Trust, Warn, distrust, loaded_run

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    from calfat_plugin.datasets import ImageData

EXAMPLES = 2000
PERPLEXITY = 30.0
SEED = 0  # one choice of examples for all runs, so that their pictures compare


def write_tsne(directory: Path, *, examples: int = EXAMPLES, warn: Warn, trust: Trust = distrust) -> dict[str, Any]:
    """Compute the embedding of one run's last checkpoint and write it into the run directory.

    Args:
        examples: at most so many clean test examples, as many of each class as can be.
    """
    from sklearn.manifold import TSNE as Embedding  # noqa: N811 (beside our file's name)

    with loaded_run(directory, LAST, warn, trust=trust) as run:
        refuse_unwritable(directory, IN_THE_RUN)
        chosen = balanced(run.dataset.test, run.dataset.num_classes, examples)
        batch_size = run.experiment.evaluation.batch_size
        features = penultimate_features(run.model(), chosen.to(run.device), batch_size)
        if len(chosen) < 3:
            raise ModelError(f"{directory}: {len(chosen)} balanced test examples are too few for a t-SNE.")
        perplexity = min(PERPLEXITY, (len(chosen) - 1) / 3)
        points = Embedding(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)
        content = {
            "checkpoint": LAST,
            "round": run.checkpoint[0].round,
            "perplexity": perplexity,
            "seed": SEED,
            "class_names": list(run.dataset.class_names),
            "labels": chosen.y.tolist(),
            "points": [[round(float(x), 3), round(float(y), 3)] for x, y in points],
            "calfat_plugin": __version__,
        }
    write_text(directory / TSNE, json.dumps(content, allow_nan=False) + "\n", TRY_AGAIN)
    return content


def balanced(data: ImageData, num_classes: int, examples: int) -> ImageData:
    """At most ``examples`` of ``data``, equally many of each class that has any, chosen with a fixed seed."""
    import torch

    from calfat_plugin.seeds import generator

    members = [torch.nonzero(data.y == label).flatten() for label in range(num_classes)]
    members = [indices for indices in members if len(indices)]
    each = min(max(1, examples // len(members)), min(map(len, members)))
    stream = generator(SEED, "t-SNE")
    chosen = [indices[torch.randperm(len(indices), generator=stream)[:each]] for indices in members]
    return data.subset(torch.cat(chosen).sort().values.numpy())


def penultimate_features(model: nn.Module, data: ImageData, batch_size: int) -> npt.NDArray[np.float32]:
    """What goes into the model's last layer: (N, F).

    For models of our base class that is ``features``; in others, the input of the last ``nn.Linear``.

    Raises:
        ModelError: there is no such layer, or it was not reached.
    """
    import torch
    from torch import nn

    from calfat_plugin.datasets.batches import batches
    from calfat_plugin.models.base import ImageClassifier

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    last = model.classifier if isinstance(model, ImageClassifier) else layers[-1] if layers else None
    if last is None:
        raise ModelError(f"model {type(model).__name__} has no nn.Linear whose input could be its features.")
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(1).float().cpu()))
    try:
        with torch.no_grad():
            for x, _, _ in batches(data, batch_size, data.x.device):
                model(x)
    finally:
        handle.remove()
    if sum(map(len, seen)) != len(data):
        raise ModelError(f"model {type(model).__name__} does not pass each image through its last layer exactly once.")
    features: npt.NDArray[np.float32] = torch.cat(seen).numpy()
    return features
