"""Figure 6 of the paper: a t-SNE of penultimate features, a panel for each run.

    python studies/paper/features.py RUN_DIR... [--out FILE]

Features are what goes into the last linear layer of a run's last model, for test images without an attack, as many of
each class as can be. The paper says neither perplexity nor number of images nor seed; they are the constants below.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from torch import Tensor, nn

import calfat_plugin as calfat

EXAMPLES = 2000  # at most
PERPLEXITY = 30.0  # less with few examples
SEED = 0  # one choice of images for all runs, so that their pictures compare


def balanced(labels: Tensor, examples: int) -> Tensor:
    """Ascending indices of at most ``examples`` images, as many of each class that is there."""
    members = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
    each = min(max(1, examples // len(members)), *map(len, members))
    stream = torch.Generator().manual_seed(SEED)
    return torch.cat([of[torch.randperm(len(of), generator=stream)[:each]] for of in members]).sort().values


def features(model: nn.Module, x: Tensor) -> np.ndarray[Any, Any]:
    """What goes into the model's last linear layer: (N, F)."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(1)))
    with torch.no_grad():
        for batch in x.split(500):
            model(batch)
    handle.remove()
    return torch.cat(seen).numpy()


def draw(axes: Any, run: Path) -> None:
    """The panel of a run: a point an image, the class's name at the median of its points."""
    recipe = calfat.load_run(run).recipe
    data_args, options = recipe["data_args"], recipe["calfat"].get("dataset") or {}
    data = calfat.load_dataset(data_args["dataset"], root=data_args["data_cache_dir"], **options)
    chosen = balanced(data.test.y, EXAMPLES)
    found = features(calfat.load_model(run), data.test.x[chosen])
    perplexity = min(PERPLEXITY, (len(chosen) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(found)
    for label, name in enumerate(data.class_names):
        of_class = points[(data.test.y[chosen] == label).numpy()]
        if len(of_class):
            axes.plot(*of_class.T, ".", markersize=3)
            axes.annotate(name, np.median(of_class, axis=0), ha="center", va="center", weight="bold", fontsize=8)
    axes.set_title(f"{recipe['calfat']['trainer']['name']}, {len(chosen)} images", fontsize=9)
    axes.set_axis_off()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run directories, such as those of table1.yaml")
    place = Path("runs/paper/features.pdf")
    parser.add_argument("--out", type=Path, default=place, help="default: %(default)s")
    given = parser.parse_args(arguments)
    figure = Figure(figsize=(3.2 * len(given.runs), 3.2), layout="constrained")
    for axes, run in zip(figure.subplots(1, len(given.runs), squeeze=False)[0], given.runs, strict=True):
        draw(axes, run)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out)
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
