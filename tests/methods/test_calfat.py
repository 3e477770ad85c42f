"""CalFAT: what the presets say, and whole local trainings by hand."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.interfaces import AttackBatch
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.calfat import CalFAT
from tests.methods.helpers import build_method, local_task, registry, train, watched
from tests.methods.test_inner_attacks import build_inner


def preset(name: str, dataset: str = "cifar10", **options: Any) -> Experiment:
    """The shortest recipe that names a preset."""
    document = parse_document(f"data_args: {{dataset: {dataset}}}", "short.yaml")
    trainer = {"name": "calfat", "preset": name, **options}
    return assemble(document.with_value(("calfat", "trainer"), trainer, "test"), registry())


PAPER = {"prior": "frequencies", "prior_weight": 1.0, "scale": 1.0, "delta": None}
RELEASE = {"prior": "counts", "prior_weight": 0.1, "scale": 10.0}


@pytest.mark.parametrize(
    ("name", "losses", "partition", "weights"),
    [
        ("paper", PAPER, "dirichlet_plain", "examples"),
        ("release", RELEASE, "dirichlet", "uniform"),
        ("repro", PAPER, "dirichlet", "uniform"),
    ],
)
def test_presets(name: str, losses: dict[str, Any], partition: str, weights: str) -> None:
    experiment = preset(name)
    options = experiment.trainer.options
    assert {key: getattr(options, key) for key in losses} == losses
    assert (options.outer, options.inner, options.adv_ratio, options.start_noise) == ("calibrated", "ckl", 1.0, 1e-3)
    assert (experiment.partition.name, experiment.data.partition_alpha) == (partition, 0.1)
    assert (experiment.aggregator.name, experiment.aggregator.options.weights) == ("fedavg", weights)
    train = experiment.train
    assert (train.client_num_in_total, experiment.clients_per_round, train.comm_round) == (5, 5, 150)
    assert (train.epochs, train.batch_size, train.learning_rate, train.momentum) == (1, 128, 0.01, 0.9)
    threat = experiment.threat
    assert (threat.norm, str(threat.eps), str(threat.step_size), threat.steps) == ("linf", "8/255", "2/255", 10)
    assert experiment.model.name == "cnn"
    assert any("CalFAT" in citation.text for citation in experiment.citations())


@pytest.mark.parametrize(
    ("dataset", "weight_decay"), [("cifar10", 2e-3), ("cifar100", 2e-3), ("svhn", 2e-4), ("digits", 2e-4)]
)
def test_weight_decay_follows_the_release(dataset: str, weight_decay: float) -> None:
    """The release compares with "cifar10", which is also how "cifar100" begins."""
    assert preset("release", dataset).train.weight_decay == weight_decay


def test_an_option_of_the_recipe_wins_over_the_presets() -> None:
    options = preset("repro", parameterisation="release").trainer.options
    assert {key: getattr(options, key) for key in RELEASE} == RELEASE


class CrossEntropyForm(CalFAT):
    """The attack as the paper writes it: the cross-entropy against the answer to the clean image."""

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        wanted = batch.loss.attack_logits(batch.logits_nat).softmax(dim=1)
        found: Tensor = -(wanted * batch.loss.attack_logits(batch.logits_adv).log_softmax(dim=1)).sum()
        return found


@pytest.mark.parametrize("inner", ["rs-fgsm", "n-fgsm", "pgd"])
def test_the_divergence_climbs_to_the_images_of_the_papers_cross_entropy(inner: str) -> None:
    """Which needs the clean answer at the weights of this mini-batch, too, so there is no pass to save."""
    method, found = build_method("calfat", "calibrated"), []
    threat = ThreatModel(norm="l2", eps=1)  # whose steps do not turn with the last bit of a gradient near zero
    for cls in (CalFAT, CrossEntropyForm):
        seen: list[Tensor] = []
        watching = watched(cls(method.options, method.modifier), lambda batch, seen=seen: seen.append(batch.x_adv))
        train(watching, local_task(threat=threat, inner=build_inner(inner)))
        found.append(seen[0].detach())
    assert (found[0] - found[1]).abs().max() <= 1e-6
