"""MI-FGSM: its step, and that a decay of 0 is BIM. Its steering by hand is in ``tests/maths/test_attacks.py``."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.evaluators.gradient import MIFGSM, PGD, BIMOptions, MIFGSMOptions
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.threat import ThreatModel

MakeTask = Callable[..., EvaluationTask]


def test_a_step_is_eps_over_steps_as_published(digits_model: nn.Module, digits: ImageData, make_task: MakeTask) -> None:
    def settings(options: MIFGSMOptions, threat: ThreatModel) -> tuple[str, str, str]:
        task = make_task(digits_model, digits.subset(range(2)), threat=threat)
        found = MIFGSM(options).evaluate(task, "mi-fgsm").settings
        assert (found["attack"], found["decay"], found["start"]) == ("mi-fgsm", options.decay, "x")
        return found["norm"], found["eps"], found["step_size"]

    run = ThreatModel(eps="8/255", step_size="2/255")  # type: ignore[arg-type]
    assert settings(MIFGSMOptions(), run) == ("linf", "8/255", "4/1275")
    assert settings(MIFGSMOptions(steps=4), run) == ("linf", "8/255", "2/255")
    assert settings(MIFGSMOptions(step_size=Fraction(1, 100)), run) == ("linf", "8/255", "0.01")
    assert settings(MIFGSMOptions(norm="l2", eps=Fraction(1, 2)), run) == ("l2", "0.5", "0.05")
    assert settings(MIFGSMOptions(eps=Fraction(0)), run) == ("linf", "0", "0")


def test_without_decay_it_is_bim(digits_model: nn.Module, digits: ImageData, make_task: MakeTask) -> None:
    data, noise = digits.subset(range(40)), torch.Generator()
    task = make_task(digits_model, data)
    bim = PGD(BIMOptions(steps=10, step_size=Fraction(1, 100))).craft(task, data.x, data.y, noise)
    plain = MIFGSM(MIFGSMOptions(decay=0.0)).craft(task, data.x, data.y, noise)
    evaluator = MIFGSM(MIFGSMOptions())
    kept, again = (evaluator.craft(task, data.x, data.y, noise) for _ in range(2))
    assert torch.equal(plain, bim)
    assert not torch.equal(kept, bim)
    assert torch.equal(kept, again)  # a batch does not begin with the direction of the one before it
