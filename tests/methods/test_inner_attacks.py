"""The attack of training is a choice (`calfat.threat.inner`): steps, sets, costs, who gets it, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin import testing
from calfat_plugin.cli.schema import recipe_schema
from calfat_plugin.datasets import ImageData
from calfat_plugin.entries import InnerAttackEntry, TrainerEntry
from calfat_plugin.errors import CalfatError, OptionError
from calfat_plugin.experiment import assemble
from calfat_plugin.interfaces import AttackBatch, InnerAttack, InnerTask, TrainBatch
from calfat_plugin.recipe.document import Document, parse_document
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import tiny_experiment
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.methods.helpers import (
    RECIPE,
    Federation,
    build_method,
    experiment,
    local_task,
    registry,
    tasks_of,
    train,
    watched,
)
from tests.methods.test_reference_training import NOISE, REFERENCE, X, Y, tiny_model
from tests.methods.test_reference_training import SETTINGS as REFERENCE_SETTINGS
from tests.plugins import offering
from tests.snapshot import TextSnapshot

ONE_STEP = ("rs-fgsm", "n-fgsm")
THREAT = ThreatModel(eps="1/8", step_size="eps/4", steps=5)


def build_inner(name: str, **options: Any) -> InnerAttack:
    entry, _ = registry().find(InnerAttackEntry, name)
    inner: InnerAttack = entry.load()(entry.config(**options))
    return inner


# --- what they compute ------------------------------------------------------------------------------------------------


def where(x_nat: Tensor) -> Tensor:
    return torch.tensor([next(i for i in range(2) if torch.equal(X[i], x)) for x in x_nat])


@pytest.mark.parametrize("name", ONE_STEP)
def test_one_local_step_equals_the_published_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the uniform noise that was drawn, in whatever order the loader gives the images."""

    def drawn(self: Tensor, low: float, high: float, *, generator: torch.Generator) -> Tensor:
        assert low == -high
        return self.copy_(NOISE / 1.5 * high)

    inner, seen = build_inner(name), {}

    class Repeatable(type(inner)):  # type: ignore[misc]  # the class under test
        def start(self, x_nat: Tensor, threat: ThreatModel, generator: torch.Generator) -> Tensor:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "uniform_", drawn)
                found: Tensor = super().start(X, threat, generator)
            return found[where(x_nat)]

    method = watched(build_method("fedpgd"), lambda b: seen.update(x_adv=b.x_adv[where(b.x_nat).argsort()]))
    task = local_task(
        tiny_model(),
        ImageData(X, Y),
        settings=REFERENCE_SETTINGS,
        threat=ThreatModel(),
        class_counts=torch.tensor([50, 30, 20, 0]),
        inner=Repeatable(inner.options),
    )
    update = method.fit(task)
    weights = torch.cat([tensor.flatten() for tensor in update.state.values()])
    assert seen["x_adv"].flatten().tolist() == pytest.approx(REFERENCE[name]["x_adv"], abs=1e-6)
    assert update.metrics["loss"] == pytest.approx(REFERENCE[name]["loss"], abs=1e-6)
    assert weights.tolist() == pytest.approx(REFERENCE[name]["weights"], abs=1e-6)


GREY = torch.full((8, 1, 8, 8), 0.5)


@pytest.mark.parametrize(
    ("name", "options", "radius", "reach"),
    [
        ("rs-fgsm", {}, 1, 1),
        ("n-fgsm", {}, 2, 3),
        ("n-fgsm", {"noise": 0.5}, 0.5, 1.5),
        ("n-fgsm", {"step": 0.25}, 2, 2.25),
    ],
)
def test_noise_and_reach(name: str, options: dict[str, Any], radius: float, reach: float) -> None:
    """The start is uniform in a ball of ``radius`` budgets, and the images lie in one of ``reach``."""
    inner = build_inner(name, **options)
    start = inner.start(GREY, THREAT, torch.Generator().manual_seed(1))
    assert start is not None
    assert (start - GREY).abs().max().item() == pytest.approx(radius / 8, rel=0.02)
    assert (start - GREY).std().item() == pytest.approx(radius / 8 / 3**0.5, rel=0.1)
    assert float(inner.reach(THREAT).eps) == reach / 8
    task = InnerTask(nn.Flatten(), GREY, start, lambda logits: logits.sum(), THREAT)  # climbs towards white
    step = options.get("step", 1.25 if name == "rs-fgsm" else 1)
    limit = GREY + 1 / 8 if name == "rs-fgsm" else torch.ones(())
    assert torch.allclose(inner.craft(task), (start + step / 8).minimum(limit), atol=1e-6)


# --- whom they reach --------------------------------------------------------------------------------------------------


@pytest.fixture
def farthest(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Client to the largest change of a pixel that it trained on."""
    found: dict[int, float] = {}
    own = FedPGD.train_loss

    def watched(self: FedPGD, batch: TrainBatch) -> Tensor:
        moved = float((batch.x_adv - batch.x_nat).abs().max())
        found[batch.task.client] = max(found.get(batch.task.client, 0), moved)
        return own(self, batch)

    monkeypatch.setattr(FedPGD, "train_loss", watched)
    return found


def test_every_client_trains_with_the_recipes_attack_and_a_group_with_its_own(farthest: dict[int, float]) -> None:
    group = {"ids": 1, "threat": {"inner": {"name": "n-fgsm", "noise": 1}}}
    Federation(experiment("fedpgd", calfat__threat__inner="n-fgsm", calfat__clients=[group])).play()
    assert farthest == {client: pytest.approx(0.2 if client == 1 else 0.3, abs=2e-3) for client in range(3)}
    Federation(experiment("fedpgd")).play()
    assert max(farthest[client] for client in range(3)) > 0.1
    farthest.clear()
    Federation(experiment("fedpgd")).play()
    assert farthest == {client: pytest.approx(0.1, abs=1e-6) for client in range(3)}


def test_a_divergence_is_climbed_in_one_step_from_the_noise() -> None:
    """FedTRADES attacks from the attack's noise, not from its own start, which is next to the image."""
    begun: list[float] = []

    class Watched(type(build_inner("rs-fgsm"))):  # type: ignore[misc]
        def craft(self, task: InnerTask) -> Tensor:
            begun.append(float((task.start - task.x_nat).abs().max()))
            found: Tensor = super().craft(task)
            assert not torch.equal(found, task.threat.project(task.start, task.x_nat))
            return found

    inner = Watched(build_inner("rs-fgsm").options)
    train(build_method("fedtrades"), local_task(threat=THREAT, inner=inner))
    assert min(begun) > 0.1


@pytest.mark.parametrize("inner", [*ONE_STEP, "sora"])
@pytest.mark.parametrize("name", registry().names(TrainerEntry))
def test_every_method_trains_with_an_attack_of_one_step(name: str, inner: str) -> None:
    """Two rounds, and the same bits when they are resumed."""
    options = {"fedgairat": {"weighting": "discrete"}, "fedlat": {"clean_rounds": 1}}.get(name, {})
    threat = {"eps": "0.1", "inner": inner}
    check_federation(tiny_experiment(registry(), trainer={"name": name, **options}, threat=threat))


def test_a_method_with_its_own_attack_uses_it(snapshot: TextSnapshot) -> None:
    class White(FedPGD):
        def craft(self, batch: AttackBatch, task: InnerTask, inner: InnerAttack) -> Tensor:
            return task.threat.project(torch.ones_like(task.x_nat), task.x_nat)

        def train_loss(self, batch: TrainBatch) -> Tensor:
            assert torch.equal(batch.x_adv, (batch.x_nat + 1 / 8).clamp(max=1))
            return super().train_loss(batch)

    base = build_method("fedpgd")
    train(White(base.options, base.modifier), local_task(threat=THREAT))
    found = [TrainerEntry("white", build=White), TrainerEntry("later", build=lambda *given: White(*given))]
    with_it = testing.builtin_registry(offering(*found))
    for name in ("white", "later"):  # what builds the second one does not say that it has an attack
        document = parse_document(RECIPE, "test.yaml").with_value(("calfat", "trainer"), name, "test.yaml:1")
        assemble(document, with_it).build_trainer()
        with snapshot.raises(CalfatError):
            assemble(
                document.with_value(("calfat", "threat", "inner"), "n-fgsm", "test.yaml:2"), with_it
            ).build_trainer()


def test_steps_of_the_task_are_those_of_the_attack() -> None:
    """FedGAIRAT, whose weights depend on them, trains with one step of N-FGSM as with one of PGD."""
    run = experiment({"name": "fedgairat", "weighting": "discrete"}, calfat__threat__inner="n-fgsm")
    assert (run.threat.steps, run.threat.in_training.steps) == (2, 1)
    assert [task.threat.steps for task in tasks_of(Federation(run)).values()] == [1, 1, 1]


# --- what a recipe may say --------------------------------------------------------------------------------------------


def test_the_recipe_in_full_has_the_attack_where_it_is_not_pgd() -> None:
    plain = {"norm": "linf", "eps": "0.1", "step_size": "0.05", "steps": 2}
    noisy = {**plain, "inner": {"name": "n-fgsm", "noise": 2.0, "step": 1.0}}
    group = {"ids": [1], "threat": {"inner": "pgd"}}
    for given in (None, "pgd", {"name": "pgd"}):
        assert experiment("fedpgd", calfat__threat__inner=given).as_run()["calfat"]["threat"] == plain
    run = experiment("fedpgd", calfat__threat__inner="n-fgsm", calfat__clients=[group])
    full = run.as_run()
    assert full["calfat"]["threat"] == noisy
    assert full["calfat"]["clients"][0]["threat"] == {**plain, "inner": {"name": "pgd"}}
    again = assemble(Document("recipe.yaml", full), registry())
    assert again.as_run() == full
    assert again.clients[0].recipe.threat.inner.name == "pgd"


@pytest.mark.parametrize(
    ("trainer", "inner", "key"),
    [
        ("fedpgd", "n-fgsm", ".steps"),
        ("fedpgd", "pgd", None),
        ("standard", "rs-fgsm", ".inner"),
        ("standard", "pgd", None),
    ],
)
def test_keys_without_effect_draw_a_warning(trainer: str, inner: str, key: str | None) -> None:
    text = f"calfat:\n  threat: {{steps: 4, inner: {inner}}}\n  trainer: {trainer}\n"
    said = assemble(parse_document(text, "test.yaml"), registry()).warnings
    assert len(said) == (key is not None)
    assert all(each.startswith(f"test.yaml:2: calfat.threat{key}: this key has no effect here") for each in said)
    # A suite compares attacks on one file; PGD's step is not that of an attack of one step.
    assert experiment("fedpgd", calfat__threat__inner="n-fgsm").warnings == ()
    short = "{threat: {eps: 0.1, step_size: 0.001, inner: %s}, evaluators: [natural], monitor: {evaluators: []}}"
    for name, number in (("pgd", 1), ("rs-fgsm", 0)):
        found = assemble(parse_document(f"calfat: {short % name}", "test.yaml"), registry())
        assert len(found.warnings) == number


@pytest.mark.parametrize(
    ("trainer", "inner", "text"),
    [
        ("fedgairat", "n-fgsm", "test.yaml:1: calfat.trainer: weighting tanh divides by half the attack's steps"),
        ("fedpgd", "nfgsm", "calfat.threat.inner: no inner attack called 'nfgsm'. Did you mean 'n-fgsm'?"),
        ("fedpgd", {"name": "n-fgsm", "step": 0}, "calfat.threat.inner.step: got 0 (int), expected a number, > 0."),
        ("fedpgd", {"name": "pgd", "steps": 3}, "calfat.threat.inner.steps: inner attack 'pgd' has no option 'steps'."),
    ],
)
def test_what_is_refused(trainer: str, inner: Any, text: str) -> None:
    with pytest.raises(CalfatError, match=re.escape(text)):
        experiment(trainer, calfat__threat__inner=inner)


def test_an_attack_is_checked_against_the_recipe_and_an_editor_knows_it_in_a_group() -> None:
    def check(options: Any, recipe: Any) -> None:
        raise OptionError(f"{recipe.num_clients} clients are too many.")

    entry = InnerAttackEntry("picky", build=InnerAttack, check=check)
    known = testing.builtin_registry(offering(entry))
    document = parse_document(RECIPE, "test.yaml")
    with pytest.raises(CalfatError) as raised:
        assemble(document.with_value(("calfat", "threat", "inner"), "picky", "test.yaml:2"), known)
    assert str(raised.value) == "test.yaml:2: calfat.threat.inner: 3 clients are too many."
    calfat = recipe_schema(known)["properties"]["calfat"]["properties"]
    for threat in (calfat["threat"], calfat["clients"]["items"]["properties"]["threat"]):
        names = [each["const"] for each in threat["properties"]["inner"]["else"]["anyOf"][:-1]]
        assert names == ["atas", "free", "n-fgsm", "pgd", "picky", "rs-fgsm", "sora"]
