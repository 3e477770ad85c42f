"""What lower precision costs an attack: the divergence that it reaches and the accuracy that it leaves, beside fp32's.

    python -m benchmarks.precision --threads 2

Prints Markdown. Run it from the root of a checkout. The attacks are those of training, of CalFAT (K 10, from noise of
0.001) and of FedPGD with 20 steps (PGD-20), on a ``cnn`` that FedPGD has trained; the model does not move meanwhile
(learning rate 0). Each repeat has other noise, the same for all precisions. What an attack reached is measured in
float64.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn

from benchmarks.evaluation import CPU, STEPS, trained
from benchmarks.loops import task, trainer
from benchmarks.measuring import Report, Spread, command, machine, say, words
from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.data import NO_AUGMENTATION
from calfat_plugin.interfaces import TrainBatch
from calfat_plugin.maths.losses import kl_divergence
from calfat_plugin.maths.passes import Precision


def attacked(method: str, model: nn.Module, data: ImageData, steps: int, precision: Precision, seed: int) -> TrainBatch:
    """All of ``data`` as one batch of a client's round, with the examples that the method's attack has made."""
    seen: list[TrainBatch] = []
    trains = trainer(method)
    train_loss = trains.train_loss

    def note(batch: TrainBatch) -> Tensor:
        seen.append(batch)
        return train_loss(batch)

    trains.train_loss = note  # type: ignore[method-assign]
    work = task(copy.deepcopy(model), data, CPU, steps=steps, precision=precision)
    still = dataclasses.replace(work.settings, learning_rate=0.0, batch_size=len(data))
    trains.fit(dataclasses.replace(work, settings=still, augment=NO_AUGMENTATION, seed=seed))
    (batch,) = seen
    return batch


def reached(method: str, model: nn.Module, data: ImageData, steps: int, precision: Precision, seed: int) -> float:
    """CalFAT: the divergence (mean); FedPGD: how many examples withstand."""
    batch, exact = attacked(method, model, data, steps, precision, seed), copy.deepcopy(model).double()
    with torch.no_grad():
        clean, adversarial = (exact(x.double()) for x in (batch.x_nat, batch.x_adv))
    if method == "fedpgd":
        return float((adversarial.argmax(1) == batch.y).sum())
    return float(kl_divergence(batch.loss.attack_logits(clean), batch.loss.attack_logits(adversarial)))


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = command(__doc__)
    parser.add_argument("--images", type=int, default=500, help="default: 500")
    parser.add_argument("--epochs", type=int, default=8, help="of the model's training; default: 8")
    parser.add_argument("--precision", type=words, default=["bf16"], help="comma-separated, beside fp32")
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    report = Report("Attacks in lower precision", machine(CPU))
    model, data = trained("cnn", given.images, given.epochs)
    rows = []
    found: dict[str, Spread] = {}
    for method, steps in (("calfat", 10), ("fedpgd", STEPS)):
        for kind in dict.fromkeys(("fp32", *given.precision)):
            made = [reached(method, model, data, steps, kind, seed) for seed in range(given.repeats)]
            found[f"{method}, {kind}"] = Spread(tuple(made))
            say(f"{method}, {kind}: {found[f'{method}, {kind}']}")
    report.keep("reached", found)
    for precision in given.precision:
        left = [
            mine - theirs
            for mine, theirs in zip(found[f"fedpgd, {precision}"].values, found["fedpgd, fp32"].values, strict=True)
        ]
        rows.append(
            (
                precision,
                found[f"calfat, {precision}"].over(found["calfat, fp32"]),
                found["fedpgd, fp32"],
                found[f"fedpgd, {precision}"],
                Spread(tuple(left)),
            )
        )
    report.table(
        f"`cnn`, {given.images:,} images of 3x32x32, {given.repeats} seeds",
        ["precision", "KL reached over fp32's", "withstand PGD-20, fp32", "withstand PGD-20", "difference"],
        rows,
    )
    report.finish(given.json)


if __name__ == "__main__":
    main()
