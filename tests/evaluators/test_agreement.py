"""FGSM, BIM, PGD, MI-FGSM and CW against torchattacks and foolbox.

Those packages are not installed here: ``benchmarks/attack_agreement.py`` ran them on a tiny network and wrote down what
they gave. The same script compares on 500 examples of trained networks; docs/evaluation.md has the outcome.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.evaluators.base import BudgetedAttack
from calfat_plugin.evaluators.gradient import CW, FGSM, MIFGSM, PGD, CWOptions, FGSMOptions, MIFGSMOptions, PGDOptions
from calfat_plugin.exact import parse_number
from calfat_plugin.threat import ThreatModel

VECTORS = json.loads(Path(__file__).with_name("agreement.json").read_text())


def evaluator(case: dict[str, Any]) -> BudgetedAttack:
    start = "uniform" if case["random"] else "x"
    if case["name"] == "FGSM":
        return FGSM(FGSMOptions())
    if case["name"].startswith("MI-FGSM"):
        return MIFGSM(MIFGSMOptions(steps=case["steps"], step_size=parse_number(case["step_size"])))
    if case["name"].startswith("CW"):
        return CW(CWOptions(steps=case["steps"], start=start, kappa=VECTORS["kappa"]))
    return PGD(PGDOptions(steps=case["steps"], start=start))


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['name']}-{case['norm']}-{case['package']}")
def test_other_packages_make_the_same_examples(case, make_task):
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 4)).eval()
    model.load_state_dict({name: torch.tensor(values) for name, values in VECTORS["weights"].items()})
    x, y = torch.tensor(VECTORS["x"]), torch.tensor(VECTORS["y"])
    threat = ThreatModel(case["norm"], case["eps"], case["step_size"], case["steps"])
    task = make_task(model, ImageData(x, y), num_classes=4, threat=threat)

    x_adv = evaluator(case).craft(task, x, y, torch.Generator().manual_seed(case["noise_seed"]))

    torch.testing.assert_close(x_adv, torch.tensor(case["x_adv"]), atol=2e-6, rtol=0)
    assert (model(x_adv).argmax(1) == y).tolist() == case["correct"]
