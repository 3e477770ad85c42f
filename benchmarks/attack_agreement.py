"""Do our attacks agree with torchattacks and foolbox, example by example?

Both are installed apart, never beside this package, in an environment that has torch::

    python -m venv /tmp/other && /tmp/other/bin/pip install torch numpy scipy requests GitPython typing_extensions
    /tmp/other/bin/pip install --no-deps torchattacks foolbox eagerpy pyautoattack
    python benchmarks/attack_agreement.py /tmp/other/bin/python [--vectors tests/evaluators/agreement.json]

This process trains two small networks on scikit-learn's digits (as they are, and painted in colour on 32x32 pixels),
attacks 500 examples of each, and has the other Python attack the very same. Same model, examples, start, steps; the
comparison is of verdicts (is the final point classified correctly?) and of pixels. ``--vectors`` writes what the other
packages gave for a handful of examples and a tiny network, which a test compares with on machines that lack them.

In l1, foolbox projects on the ball and then clips to the pixel range, which leaves part of the budget unused. We
project on both at once, as pyautoattack does. So foolbox attacks twice there: as it is, and with pyautoattack's
projection. The second must agree with us, the first is in the table for comparison.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = 500
SEED = 2021
KAPPA = 50.0
ROUNDING = 1e-6
LEAST = {"linf": 0.995, "l2": 0.995, "l1": 0.985}  # same verdicts; in l1 the last bit may choose another pixel to move
# (name, package, norm, steps, random start); eps and step size belong to the data.
CASES = (
    ("FGSM", "torchattacks", "linf", 1, False),
    ("BIM, 20 steps", "torchattacks", "linf", 20, False),
    ("PGD-20, no random start", "torchattacks", "linf", 20, False),
    ("PGD-20, random start", "torchattacks", "linf", 20, True),
    ("PGD-20, random start", "foolbox", "linf", 20, True),
    ("PGD-20, random start", "foolbox", "l2", 20, True),
    ("CW-20, random start", "foolbox", "linf", 20, True),
    ("CW-20, random start", "foolbox", "l2", 20, True),
    ("MI-FGSM, 10 steps", "torchattacks", "linf", 10, False),
    ("PGD-20, no random start", "foolbox", "l1", 20, False),
    ("PGD-20, no random start", "foolbox with pyautoattack", "l1", 20, False),
    ("PGD-20, random start", "foolbox with pyautoattack", "l1", 20, True),
    ("CW-20, random start", "foolbox with pyautoattack", "l1", 20, True),
)
TINY = "tiny 1x3x3"
DATA = {  # norm to (eps, step size)
    "digits 1x8x8": {"linf": (0.1, 0.025), "l2": (0.5, 0.1), "l1": (2.0, 0.5)},
    "digits 3x32x32": {"linf": (8 / 255, 2 / 255), "l2": (0.5, 0.1), "l1": (8.0, 2.0)},
    TINY: {"linf": (0.15, 0.02), "l2": (0.3, 0.05), "l1": (0.6, 0.15)},
}


def comparable(case: dict[str, Any]) -> bool:
    """Whether the other package does the same as we do."""
    return bool((case["package"], case["norm"]) != ("foolbox", "l1"))


def network(data: str) -> nn.Module:
    """The same plain network in both processes; the other one has nothing of this package."""
    if data == TINY:
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 4))
    channels, side = (1, 8) if data == "digits 1x8x8" else (3, 32)
    pool = 1 if side == 8 else 4
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.MaxPool2d(pool),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


# --- the other process ------------------------------------------------------------------------------------------------


def theirs(folder: Path) -> None:
    """Attack what ``folder`` holds with the packages of this Python, and leave the adversarial examples there."""
    job = torch.load(folder / "job.pt", weights_only=True)
    versions = {}
    for index, case in enumerate(job["cases"]):
        model = network(case["data"])
        model.load_state_dict(job[case["data"]]["weights"])
        model.eval()
        x, y = job[case["data"]]["x"], job[case["data"]]["y"]
        run = _torchattacks if case["package"] == "torchattacks" else _foolbox
        x_adv, version = run(model, x, y, job["starts"][index], case)
        versions[case["package"]] = version
        torch.save(x_adv.detach(), folder / f"{index}.pt")
    (folder / "versions.json").write_text(json.dumps(versions))


def _torchattacks(model: nn.Module, x: Tensor, y: Tensor, start: Tensor, case: dict[str, Any]) -> tuple[Tensor, str]:
    import torchattacks

    if case["name"] == "FGSM":
        attack = torchattacks.FGSM(model, eps=case["eps"])
    elif case["name"].startswith("BIM"):
        attack = torchattacks.BIM(model, eps=case["eps"], alpha=case["step_size"], steps=case["steps"])
    elif case["name"].startswith("MI-FGSM"):
        attack = torchattacks.MIFGSM(model, eps=case["eps"], alpha=case["step_size"], steps=case["steps"])
    else:
        attack = torchattacks.PGD(
            model, eps=case["eps"], alpha=case["step_size"], steps=case["steps"], random_start=case["random"]
        )
    torch.manual_seed(case["noise_seed"])  # its noise is drawn as ours is, from this seed
    return attack(x, y), torchattacks.__version__ if hasattr(torchattacks, "__version__") else _version("torchattacks")


def _foolbox(model: nn.Module, x: Tensor, y: Tensor, start: Tensor, case: dict[str, Any]) -> tuple[Tensor, str]:
    import eagerpy as ep
    import foolbox

    base = {
        "linf": foolbox.attacks.LinfProjectedGradientDescentAttack,
        "l2": foolbox.attacks.L2ProjectedGradientDescentAttack,
        "l1": foolbox.attacks.SparseL1DescentAttack,
    }[case["norm"]]

    class Attack(base):  # type: ignore[misc, valid-type]
        """foolbox's loop from a given start; for CW with the margin as the loss."""

        def get_random_start(self, x0: Any, epsilon: float) -> Any:
            return ep.astensor(start)

        def project(self, x: Any, x0: Any, epsilon: float) -> Any:
            if case["package"] == "foolbox":
                return super().project(x, x0, epsilon)
            from pyautoattack.autopgd_base import L1_projection

            found = x.raw + L1_projection(x0.raw, (x - x0).raw, epsilon)
            ends = found.round()  # a value that rounding keeps just inside its range would be chosen to move outwards
            return ep.astensor(ends.where((found - ends).abs() < ROUNDING, found))

        def get_loss_fn(self, model: Any, labels: Any) -> Any:
            if not case["name"].startswith("CW"):
                return super().get_loss_fn(model, labels)
            rows = range(len(labels))

            def loss(inputs: Any) -> Any:
                logits = model(inputs)
                one_hot = ep.onehot_like(logits, labels)
                margin = logits[rows, labels] - (logits - 1e4 * one_hot).max(axis=-1)
                return -(margin + KAPPA).maximum(0.0).sum()

            return loss

    joint = case["package"] != "foolbox"
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    attack = Attack(abs_stepsize=case["step_size"], steps=case["steps"], random_start=case["random"])
    x_adv = attack.run(wrapped, x, foolbox.criteria.Misclassification(y), epsilon=case["eps"])
    return x_adv, _version("foolbox") + (f" with pyautoattack {_version('pyautoattack')}" if joint else "")


def _version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


# --- this process -----------------------------------------------------------------------------------------------------


def images(data: str) -> tuple[Tensor, Tensor]:
    """All 1,797 digits, shuffled; in colour on 32x32 where asked for."""
    from calfat_plugin.datasets.published import load_digits

    digits = load_digits()
    x, y = torch.cat((digits.train.x, digits.test.x)), torch.cat((digits.train.y, digits.test.y))
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    if data == "digits 3x32x32":
        large = nn.functional.interpolate(x, size=(32, 32), mode="bilinear", align_corners=False)
        ink, paper = 0.4 * torch.rand(2, len(x), 3, 1, 1, generator=generator)
        x = (large * ink + (1 - large) * (1 - paper)).clamp(0, 1)
    return x, y


def trained(data: str, x: Tensor, y: Tensor, eps: float, epochs: int = 8) -> nn.Module:
    """Adversarially (FGSM), so that some examples withstand and others do not."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = network(data)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for where in torch.randperm(len(x), generator=generator).split(64):
            clean = x[where].clone().requires_grad_()
            (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(clean), y[where]), clean)
            attacked = (x[where] + eps * grad.sign()).clamp(0, 1)
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(attacked), y[where]).backward()
            optimiser.step()
    return model.eval()


def ours(model: nn.Module, x: Tensor, y: Tensor, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(x_adv, the random start) of our evaluator."""
    from calfat_plugin.datasets import ImageData
    from calfat_plugin.evaluators.gradient import (
        CW,
        FGSM,
        MIFGSM,
        PGD,
        CWOptions,
        FGSMOptions,
        MIFGSMOptions,
        PGDOptions,
    )
    from calfat_plugin.exact import parse_number as exact
    from calfat_plugin.interfaces import EvaluationTask
    from calfat_plugin.threat import ThreatModel

    threat = ThreatModel(case["norm"], case["eps"], case["step_size"], case["steps"])
    task = EvaluationTask(model, ImageData(x, y), 10, threat, len(x), torch.device("cpu"), 0, 0, y)
    how: dict[str, Any] = {"steps": case["steps"], "start": "uniform" if case["random"] else "x"}
    evaluator: Any
    if case["name"] == "FGSM":
        evaluator = FGSM(FGSMOptions())
    elif case["name"].startswith("MI-FGSM"):
        evaluator = MIFGSM(MIFGSMOptions(step_size=exact(case["step_size"]), **how))
    else:
        evaluator = CW(CWOptions(kappa=KAPPA, **how)) if case["name"].startswith("CW") else PGD(PGDOptions(**how))

    def noise() -> torch.Generator:
        return torch.Generator().manual_seed(case["noise_seed"])

    return evaluator.craft(task, x, y, noise()), threat.random_start(x, noise())


def cases(data: str) -> list[dict[str, Any]]:
    """Every case on one data set, as both processes get it."""
    return [
        {
            "data": data,
            "name": name,
            "package": package,
            "norm": norm,
            "steps": steps,
            "random": random,
            "eps": DATA[data][norm][0],
            "step_size": DATA[data][norm][0 if name == "FGSM" else 1],
            "noise_seed": SEED + index,
        }
        for index, (name, package, norm, steps, random) in enumerate(CASES)
    ]


def attack_both(
    python: str, subjects: dict[str, tuple[nn.Module, Tensor, Tensor]]
) -> tuple[list[tuple[dict[str, Any], Tensor, Tensor]], dict[str, str]]:
    """((case, our x_adv, their x_adv) for every case and subject, versions of the other packages)."""
    job: dict[str, Any] = {"cases": [], "starts": []}
    found = []
    for data, (model, x, y) in subjects.items():
        job[data] = {"weights": model.state_dict(), "x": x, "y": y}
        for case in cases(data):
            x_adv, start = ours(model, x, y, case)
            job["cases"].append(case)
            job["starts"].append(start)
            found.append((case, x_adv, start))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(job, folder / "job.pt")
        subprocess.run([python, __file__, "--theirs", name], check=True)
        versions: dict[str, str] = json.loads((folder / "versions.json").read_text())
        pairs = [
            (case, x_adv, torch.load(folder / f"{index}.pt", weights_only=True))
            for index, (case, x_adv, _) in enumerate(found)
        ]
    return pairs, versions


def compare(python: str, examples: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(a row for every case, versions of the other packages)."""
    subjects = {}
    for data in ("digits 1x8x8", "digits 3x32x32"):
        x, y = images(data)
        subjects[data] = (trained(data, x, y, DATA[data]["linf"][0]), x[:examples], y[:examples])
    pairs, versions = attack_both(python, subjects)
    rows = []
    for case, x_adv, other in pairs:
        model, _, y = subjects[case["data"]]
        rows.append({**case, **_compared(model, y, x_adv, other)})
    return rows, versions


def write_vectors(python: str, path: Path) -> None:
    """A tiny network, six images, and what the other packages made of them, every number written out."""
    generator = torch.Generator().manual_seed(SEED)
    model = network(TINY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul(100).round() / 100)
        x = torch.rand(6, 1, 3, 3, generator=generator).mul(100).round() / 100
        y = model(x).argmax(1)
    pairs, versions = attack_both(python, {TINY: (model, x, y)})
    content = {
        "made_by": [f"{package.split()[0]} {version}" for package, version in versions.items()],
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "x": x.tolist(),
        "y": y.tolist(),
        "kappa": KAPPA,
        "cases": [
            {
                **{key: value for key, value in case.items() if key != "data"},
                "x_adv": other.tolist(),
                "correct": (model(other).argmax(1) == y).tolist(),
            }
            for case, _, other in pairs
            if comparable(case) and not (case["norm"] == "l1" and case["random"])  # there rounding shows (LEAST)
        ],
    }
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")


@torch.no_grad()
def _compared(model: nn.Module, y: Tensor, ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    verdict, other = model(ours).argmax(1) == y, model(theirs).argmax(1) == y
    return {
        "accuracy": verdict.float().mean().item(),
        "same": int((verdict == other).sum()),
        "of": len(y),
        "pixels": (ours - theirs).abs().max().item(),
    }


def table(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """Markdown."""
    lines = [
        "| data | attack | norm, eps | other | our accuracy | same verdicts | largest pixel difference |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        eps = f"{row['norm']} {row['eps']:.4g}"
        other = f"{row['package'].split()[0]} {versions[row['package']]}"
        lines.append(
            f"| {row['data']} | {row['name']} | {eps} | {other} | {100 * row['accuracy']:.1f} % "
            f"| {row['same']} of {row['of']} | {row['pixels']:.2g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="?", help="a Python with torch, torchattacks and foolbox")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--vectors", type=Path, help="write the numbers that the test compares with, and stop")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.theirs is not None:
        theirs(arguments.theirs)
        return
    if arguments.python is None:
        parser.error("name a Python that has torchattacks and foolbox")
    if arguments.vectors is not None:
        write_vectors(arguments.python, arguments.vectors)
        return
    rows, versions = compare(arguments.python, arguments.examples)
    print(table(rows, versions))
    short = [row for row in rows if comparable(row) and row["same"] < LEAST[row["norm"]] * row["of"]]
    inexact = [row for row in rows if row["norm"] != "l1" and not row["random"] and row["same"] != row["of"]]
    if short or inexact:
        sys.exit(f"{len(short)} agree too little, {len(inexact)} without a random start not exact")


if __name__ == "__main__":
    main()
