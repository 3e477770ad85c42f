"""Is ``calfat trust`` right? Models that hide from attacks, honest ones, and the truth about each.

    python -m studies.trust.benchmark --seed 1 --width 12 --jobs 2 --output trust.json
    python -m studies.trust.benchmark --words

Every model is trained here on scikit-learn's digits, judged by ``calfat trust``, and then attacked through its
undefended parts: what withstands that as well is the truth, or an upper bound of it.

A masked model that *holds* although more than 5 points of its claim are false is a false *holds*. An honest one that is
accused of anything but too few images is a false alarm, unless the truth is more than 5 points lower as well. The
checks and their thresholds were developed with seed 0 and width 16; the table in README.md has other seeds and another
width. ``--words`` simulates which word is said for which true gap, from how many images.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import calfat_plugin as calfat
from studies.trust import models
from studies.trust.models import HONEST, MASKED, Judged

ON_TRIAL = "0.1"
BUDGETS = ("0.05", "0.1", "0.2")  # of the honest models
GAPS = (2, 3, 4, 5, 6, 7, 8, 10, 12)  # points
NUMBERS = (359, 500, 1000, 8000)  # of images
SAMPLES = 2000
TOLERANCE, SLACK = 0.05, 0.02  # of the verdict: docs/howto/trust.md
TRUTH_STEPS = 100
TRUTH_ITERATIONS = 50
EPOCHS = 20
_PGD_STEPS = 5


@dataclass(frozen=True)
class Case:
    """One model at one budget.

    Attributes:
        kind: name of its class in ``models``.
        eps: the budget, as a text.
        seed: of its training and of the attacks.
        width: channels of its first layer.
        examples: test images; None: all.
        epochs: of its training.
    """

    kind: str
    eps: str
    seed: int
    width: int
    examples: int | None = None
    epochs: int = EPOCHS


@dataclass(frozen=True)
class Found:
    """What came of a case; shares of the test images.

    Attributes:
        honest: whether it hides nothing.
        natural, claimed, worst: as the verdict says; None: not measured.
        truth: what the attack on the undefended parts leaves of ``worst``.
        word, usable, text, cause: of the verdict.
    """

    kind: str
    eps: str
    honest: bool
    natural: float | None
    claimed: float | None
    worst: float | None
    truth: float
    word: str
    usable: bool
    text: str
    cause: str

    @property
    def false(self) -> str:
        """``holds`` or ``alarm`` where the verdict is wrong."""
        off = self.claimed is not None and self.claimed - self.truth > TOLERANCE
        if self.word == "holds":
            return "holds" if off else ""
        accused = self.word == "overstated" or not self.usable or "too few" not in self.cause
        return "alarm" if self.honest and self.word != "not robust" and accused and not off else ""


# --- the models -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def made(name: str, seed: int, width: int, epochs: int) -> Judged:
    """A model of ``models``, trained."""
    kind: type[Judged] = getattr(models, name)
    torch.manual_seed(1000 * seed + len(name))
    model = kind(width=width)
    data = calfat.load_dataset("digits").train
    train(model.net, model.trained, data, kind.eps, seed, epochs if kind.eps else max(1, epochs // 3))
    other = getattr(model, "other", None)
    if other is not None:
        train(other, other, data, kind.eps, seed + 1, epochs)
    return model.eval()


def train(
    network: nn.Module, model: Callable[[Tensor], Tensor], data: calfat.ImageData, eps: float, seed: int, epochs: int
) -> None:
    """Adversarial training with PGD-5, whose budget grows over the first half; with eps 0 plain training."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    network.train()
    for epoch in range(epochs):
        radius = eps * min(1.0, 2 * epoch / epochs)
        for where in torch.randperm(len(data), generator=generator).split(64):
            x, y = data.x[where], data.y[where]
            x_adv = climbed(model, x, y, radius, generator) if radius else x
            optimizer.zero_grad()
            functional.cross_entropy(model(x_adv), y).backward()
            optimizer.step()
    network.eval()


def climbed(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """PGD-5 from a random start."""
    x_adv = (x + eps * (2 * torch.rand(x.shape, generator=generator) - 1)).clamp(0, 1)
    for _ in range(_PGD_STEPS):
        x_adv.requires_grad_()
        (grad,) = torch.autograd.grad(functional.cross_entropy(model(x_adv), y), x_adv)
        x_adv = x_adv.detach() + 2.5 * eps / _PGD_STEPS * grad.sign()
        x_adv = torch.minimum(torch.maximum(x_adv, x - eps), x + eps).clamp(0, 1)
    return x_adv.detach()


class Undefended(nn.Module):
    """A model without the part that hides it."""

    def __init__(self, model: Judged) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.undefended(x)


# --- verdict and truth ------------------------------------------------------------------------------------------------


def judged(case: Case) -> Found:
    """Train, judge, and attack through the undefended parts."""
    pristine, data = made(case.kind, case.seed, case.width, case.epochs), calfat.load_dataset("digits")
    x, y = data.test.x[: case.examples], data.test.y[: case.examples]
    on_trial = calfat.Dataset("digits", data.train, calfat.ImageData(x, y), 10)
    verdict = calfat.trust(pristine, on_trial, eps=case.eps, seed=case.seed)
    worst = verdict.worst if verdict.claimed is not None else None
    left = attacked(pristine, x, y, case)
    return Found(
        kind=case.kind,
        eps=case.eps,
        honest=getattr(models, case.kind) in HONEST,
        natural=verdict.natural,
        claimed=verdict.claimed,
        worst=worst,
        truth=min(left, 1.0 if worst is None else worst),
        word=verdict.word,
        usable=verdict.usable,
        text=verdict.text,
        cause=verdict.causes[0] if verdict.causes else "",
    )


def attacked(pristine: Judged, x: Tensor, y: Tensor, case: Case) -> float:
    """What PGD-100, CW-100 and APGD on the undefended parts leave, judged by the model as it is.

    Each image is judged twice, in other batches and in another order, by models that were asked nothing before.
    """
    left = are_right(pristine, x, y)
    attacks = (
        {"name": "pgd", "steps": TRUTH_STEPS},
        {"name": "cw", "steps": TRUTH_STEPS},
        {"name": "autoattack", "version": "custom", "attacks": "apgd-ce, apgd-t", "iterations": TRUTH_ITERATIONS},
    )
    for attack in attacks:
        if left.any():
            pristine.forget()
            crafted = calfat.attack(
                attack, Undefended(copy.deepcopy(pristine)).eval(), x[left], y[left], eps=case.eps, seed=case.seed
            )
            left[left.clone()] = are_right(pristine, crafted, y[left])
    return float(left.float().mean())


def are_right(pristine: Judged, x: Tensor, y: Tensor) -> Tensor:
    """(N,) bool: whether two new copies of a model both classify an image as labelled."""
    right = torch.ones(len(y), dtype=torch.bool)
    for order, size in ((torch.arange(len(y)), 500), (torch.arange(len(y)).flip(0), 100)):
        pristine.forget()
        model = copy.deepcopy(pristine)
        with torch.no_grad():
            for where in order.split(size):
                right[where] &= model(x[where]).argmax(1) == y[where]
    return right


# --- words by the true gap --------------------------------------------------------------------------------------------


def word_of(count: int, number: int) -> str:
    """The verdict's word where nothing speaks against a number but so many images of all: Wilson's interval decides."""
    low, high = stats.binomtest(count, number).proportion_ci(0.95, "wilson")
    if count / number > TOLERANCE and low > SLACK:
        return "overstated"
    return "holds" if high < TOLERANCE else "not shown"


def words(gap: float, number: int, samples: int = SAMPLES) -> dict[str, float]:
    """Word to how often ``number`` images give it where PGD-20 leaves ``gap``, a share, more than the worst case."""
    counts = np.random.default_rng(0).binomial(number, gap, samples)
    found = [word_of(count, number) for count in counts.tolist()]
    return {word: found.count(word) / samples for word in ("holds", "not shown", "overstated")}


def words_table() -> Iterator[str]:
    """Markdown."""
    yield "| true gap | " + " | ".join(f"{number:,} images" for number in NUMBERS) + " |"
    yield "| --- |" + " --- |" * len(NUMBERS)
    for gap in GAPS:
        cells = [" / ".join(f"{100 * each:.0f}" for each in words(gap / 100, number).values()) for number in NUMBERS]
        yield f"| {gap} points | " + " | ".join(cells) + " |"


# --- the table --------------------------------------------------------------------------------------------------------


def table(found: Sequence[Found]) -> Iterator[str]:
    """Markdown, and a line on what was false."""
    yield "| model | eps | claimed | worst case | truth | verdict | usable | |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for each in found:
        claimed, worst = ("-" if share is None else f"{100 * share:.1f}" for share in (each.claimed, each.worst))
        wrong = f"**false {each.false}**" if each.false else ""
        numbers = f"{claimed} | {worst} | {100 * each.truth:.1f} | {each.text} | {'yes' if each.usable else 'no'}"
        yield f"| `{each.kind}` | {each.eps} | {numbers} | {wrong} |"
    yield ""
    masked = [each for each in found if not each.honest]
    holds, alarms = ([each for each in found if each.false == what] for what in ("holds", "alarm"))
    yield (
        f"{len(masked)} masked: {len([each for each in holds if not each.honest])} false holds. "
        f"{len(found) - len(masked)} honest: {len(alarms)} false alarms."
    )


def cases(kinds: Sequence[str], seed: int, width: int) -> list[Case]:
    """Masked models at the budget that they were trained for, honest ones at three."""
    honest = {kind.__name__ for kind in HONEST}
    return [Case(kind, eps, seed, width) for kind in kinds for eps in (BUDGETS if kind in honest else (ON_TRIAL,))]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [kind.__name__ for kind in (*MASKED, *HONEST)]
    parser.add_argument("--models", default=",".join(every), help="some of them, by their names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=12, help="channels of a network's first layer")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each on one thread")
    parser.add_argument("--output", type=Path, help="a JSON file with the same, written after every model")
    parser.add_argument("--words", action="store_true", help="simulate the words by the true gap instead")
    arguments = parser.parse_args()
    if arguments.words:
        print("\n".join(words_table()))
        return
    found: list[Found] = []
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for each in pool.map(judged, cases(arguments.models.split(","), arguments.seed, arguments.width)):
            found.append(each)
            print(f"{each.kind} at {each.eps}: {each.text}", file=sys.stderr)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
