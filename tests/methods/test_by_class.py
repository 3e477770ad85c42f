"""A budget of training by class: its factors by hand, each example in its own ball, evaluation at eps."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch

from calfat_plugin import testing
from calfat_plugin.entries import InnerAttackEntry, TrainerEntry
from calfat_plugin.errors import BudgetError, PluginError, RecipeError
from calfat_plugin.interfaces import InnerAttack, InnerTask
from calfat_plugin.recipe.training import ByClassOptions
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import tiny_experiment
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.additions import class_factors
from tests.methods.helpers import (
    SETTINGS,
    Asking,
    Federation,
    TinyNet,
    build_method,
    experiment,
    local_task,
    registry,
    same_bits,
    tasks_of,
    tiny_data,
    train,
    watched,
)
from tests.plugins import offering

NOW = ByClassOptions(alpha=0.3, warmup=0)
OWN = {"fedawp": "backward", "fedgairat": "counts_iterates", "fedrbn": "backward"}
ATTACKING = [name for name in registry().names(TrainerEntry) if name != "standard"]
INNER = [entry.name for entry, _ in registry().offers(InnerAttackEntry) if entry.by_class]


def factors(counts: list[int], options: ByClassOptions = NOW, round: int = 1, rounds: int = 10) -> Any:
    return class_factors(torch.tensor(counts), options, round, rounds)


def test_the_factors_by_hand() -> None:
    """Rarities sqrt(log(100/n)) of 100, 10, 1 examples: 0, 1.517427, 2.145966; their mean is 17.320237 / 111."""
    first, second = 1.5174271293851465, 2.145966026289347
    tau = 0.3 * 111 / (10 * first + second)
    wanted = [0.7, 0.7 + tau * first, 0.7 + tau * second, 0.0]
    assert factors([100, 10, 1, 0]).tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("counts", [[100, 10, 1], [7, 0, 5, 3], [1, 2], [5000, 0, 0, 1], [9, 9, 8]])
@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_the_mean_over_examples_is_eps(counts: list[int], alpha: float) -> None:
    found = factors(counts, ByClassOptions(alpha=alpha, warmup=0)).tolist()
    assert math.fsum(n * f for n, f in zip(counts, found, strict=True)) / sum(counts) == pytest.approx(1, abs=1e-12)
    assert all((f == 0) == (n == 0) for n, f in zip(counts, found, strict=True) if alpha < 1)


@pytest.mark.parametrize("counts", [[8], [0, 8, 0], [5, 5], [0, 0]])
def test_where_no_class_is_rarer_all_have_eps(counts: list[int]) -> None:
    assert factors(counts) is None
    assert factors([9, 1], ByClassOptions(alpha=0, warmup=0)) is None


def test_eps_grows_in_the_warm_up() -> None:
    options, whole = ByClassOptions(alpha=0.3, warmup=0.8), factors([9, 1])
    for round, share in ((1, 0.0), (2, 1 / 8), (5, 0.5), (9, 1.0), (10, 1.0)):
        assert torch.allclose(factors([9, 1], options, round), share * whole)
    assert factors([4, 4, 0], options, 5).tolist() == [0.5, 0.5, 0.0]
    assert factors([4, 4], options, 9) is None


@pytest.mark.parametrize(("norm", "eps"), [("linf", "0.1"), ("l2", "0.5"), ("l1", "2")])
def test_each_example_has_its_own_ball_and_step(norm: Any, eps: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 1, 6, 6, generator=generator) * 0.2 + 0.4
    own, grad = [0.0, 0.5, 1.5], torch.randn(3, 1, 6, 6, generator=generator)
    threat = ThreatModel(norm, eps)
    apart = [dataclasses.replace(threat, eps=Fraction(factor) * threat.eps) for factor in own]
    both = dataclasses.replace(threat, factors=torch.tensor(own, dtype=torch.float64))
    far = x + 3 * grad
    alone = [each.project(far[i : i + 1], x[i : i + 1]) for i, each in enumerate(apart)]
    assert torch.allclose(both.project(far, x), torch.cat(alone))
    moved = both.distance(both.ascend(x, grad, 0.01), x)
    assert torch.allclose(moved, 0.01 * torch.tensor(own), atol=1e-6)
    one_by_one = both.distance(both.ascend(x, grad, torch.tensor([0.01, 0.02, 0.04])), x)
    assert torch.allclose(one_by_one, torch.tensor([0, 0.01, 0.06]), atol=1e-6)
    starts = both.random_start(x, generator)
    both.check(starts, x, who="start")
    plain = threat.random_start(x, torch.Generator().manual_seed(1)) - x
    mine = both.random_start(x, torch.Generator().manual_seed(1)) - x
    assert torch.allclose(mine[1], plain[1] / 2, atol=1e-6)
    assert torch.equal(both.scaled(2).factors, both.factors)
    wrong = threat.project(far, x)  # in the ball of eps, and beyond half of it
    wrong[2] = x[2]
    with pytest.raises(BudgetError, match=r"2 of 3 adversarial examples left the .* times the factor of its class"):
        both.check(wrong, x, who="wrong")


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("method", ATTACKING)
def test_every_example_is_in_the_ball_of_its_class(method: str, inner: str) -> None:
    if inner == "free" and method in OWN:
        pytest.skip("'free' leaves no place for it")
    data = tiny_data(count=12)
    data = dataclasses.replace(data, y=torch.tensor([0] * 7 + [1] * 4 + [2]))
    entry, _ = registry().find(InnerAttackEntry, inner)
    attack = entry.load()(entry.config())
    threat = ThreatModel("linf", "0.1", "eps/4", 5)
    counts = data.y.bincount(minlength=4)
    growing, seen = dataclasses.replace(NOW, warmup=0.8), []
    wanted = class_factors(counts, growing, 5, 10)  # half of eps in the mean
    settings = dataclasses.replace(SETTINGS, num_rounds=10, batch_size=12, epochs=1)
    task = local_task(
        data=data, class_counts=counts, settings=settings, threat=threat, inner=attack, by_class=growing, round=5
    )
    train(watched(build_method(method), seen.append), task)
    reach = float(attack.reach(threat).eps / threat.eps)
    assert wanted is not None
    assert seen
    for batch in seen:
        far = (batch.x_adv.detach() - batch.x_nat).abs().flatten(1).amax(dim=1)
        assert (far <= reach * 0.1 * wanted[batch.y] + 1e-6).all()
        if method == "fedpgd" and inner == "pgd":  # five steps of a quarter reach the edge
            assert torch.allclose(far, (0.1 * wanted[batch.y]).float(), atol=1e-5)


def test_a_start_is_drawn_in_the_ball_of_its_class() -> None:
    """An attack that stays there is in it, and near its edge."""
    seen = []

    class Still(InnerAttack):
        def craft(self, task: InnerTask) -> Any:
            seen.append((task.start - task.x_nat).abs().flatten(1).amax(dim=1))
            return task.start

    data = dataclasses.replace(tiny_data(count=8), y=torch.tensor([0] * 7 + [1]))
    counts = torch.tensor([7, 1, 0, 0])
    settings = dataclasses.replace(SETTINGS, batch_size=8, epochs=1)
    threat = ThreatModel("linf", "0.1", "eps/4", 5)
    task = local_task(
        TinyNet(), data, class_counts=counts, settings=settings, threat=threat, inner=Still(), by_class=NOW
    )
    train(build_method("fedpgd"), task)
    own = factors(counts.tolist())
    far = sorted(seen[0].tolist())
    assert far[-2] <= 0.1 * own[0] + 1e-6 < far[-1] <= 0.1 * own[1] + 1e-6


def test_without_a_share_the_bits_are_those_without_the_section() -> None:
    plain = train(build_method("calfat"), local_task())
    nothing = train(build_method("calfat"), local_task(by_class=ByClassOptions(alpha=0, warmup=0)))
    some = train(build_method("calfat"), local_task(by_class=ByClassOptions(alpha=1, warmup=0)))
    assert same_bits(plain.state, nothing.state)
    assert not same_bits(plain.state, some.state)


def test_an_attack_that_goes_by_eps_alone_is_found_out() -> None:
    """Each example is held to its own ball, not to that of eps."""

    class Loose(InnerAttack):
        def craft(self, task: InnerTask) -> Any:
            return (task.x_nat + float(task.threat.eps)).clamp(0, 1)

    data = dataclasses.replace(tiny_data(count=8), y=torch.tensor([0] * 7 + [1]))
    task = local_task(TinyNet(), data, class_counts=torch.tensor([7, 1, 0, 0]), inner=Loose(), by_class=NOW)
    with pytest.raises(PluginError, match="7 of 8 adversarial examples left the linf ball"):
        train(build_method("fedpgd"), dataclasses.replace(task, settings=dataclasses.replace(SETTINGS, batch_size=8)))


def test_recipes_show_it_and_evaluate_at_eps() -> None:
    by_class = {"alpha": 0.5, "warmup": 0}
    run = experiment("fedpgd", calfat__threat__by_class=by_class)
    assert run.as_run()["calfat"]["threat"]["by_class"] == {"alpha": 0.5, "warmup": 0.0}
    assert "by_class" not in experiment("fedpgd").as_run()["calfat"]["threat"]
    assert run.threat.by_class == ByClassOptions(alpha=0.5, warmup=0)
    assert run.threat.factors is None
    assert any("RobustLT" in c.text or "Long Tail" in c.text for c in run.citations())
    unused = experiment("standard", calfat__threat__by_class=by_class)
    assert any("threat.by_class: this key has no effect here" in text for text in unused.warnings)


def test_a_group_may_have_none() -> None:
    group = {"ids": 1, "threat": {"by_class": None}}
    run = experiment("fedpgd", calfat__threat__by_class={}, calfat__clients=[group])
    assert run.clients[0].recipe.threat.by_class is None
    assert run.as_run()["calfat"]["clients"][0]["threat"]["by_class"] is None


def test_evaluation_gives_every_image_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment("fedpgd", calfat__threat__by_class={"alpha": 1}, calfat__evaluators=["natural", "fgsm"])
    federation, lengths = Federation(run), set()
    federation.play()

    def noted(self: ThreatModel, x_adv: torch.Tensor, x: torch.Tensor, *, who: str) -> None:
        lengths.update(round(length, 6) for length in self.distance(x_adv, x).tolist())

    monkeypatch.setattr(ThreatModel, "check", noted)
    federation.server.final_evaluation()
    assert lengths == {0.1}


def test_an_attack_that_does_not_say_so_is_refused() -> None:
    known = testing.builtin_registry(offering(InnerAttackEntry("mine", build=InnerAttack)))
    threat = {"eps": "0.1", "inner": "mine"}
    tiny_experiment(known, trainer="fedpgd", threat=threat)
    with pytest.raises(RecipeError, match=r"calfat\.threat\.by_class: the inner attack 'mine' cannot give each"):
        tiny_experiment(known, trainer="fedpgd", threat={**threat, "by_class": {}})


def test_sora_is_refused_beside_it_and_a_group_may_do_without() -> None:
    """As the message says."""
    said = r"calfat\.threat\.by_class: the inner attack 'sora' cannot .* own by_class: null, or choose another attack"
    with pytest.raises(RecipeError, match=said):
        experiment("fedpgd", calfat__threat__by_class={}, calfat__threat__inner="sora")
    experiment("standard", calfat__threat__by_class={}, calfat__threat__inner="sora")  # which attacks nothing
    for group, both in (({"inner": "sora"}, True), ({"inner": "sora", "by_class": None}, False)):
        with pytest.raises(RecipeError, match=said) if both else nullcontext():
            experiment("fedpgd", calfat__threat__by_class={}, calfat__clients=[{"ids": 1, "threat": group}])


def test_the_full_gradient_is_that_of_its_images() -> None:
    """In the first round of a warm-up these are the clean ones."""
    asking = Asking()
    for method in ("fedpgd", "standard"):
        growing = ByClassOptions(alpha=0, warmup=0.5)
        train(build_method(method), local_task(by_class=growing, round=1, correction=asking))
    attacked, clean = asking.gradients
    assert all(torch.allclose(attacked[name], clean[name]) for name in clean)


@pytest.mark.parametrize("inner", ["pgd", "atas"])
def test_rounds_resume_to_the_same_bits(inner: str) -> None:
    threat = {"eps": "0.1", "inner": inner, "by_class": {"warmup": 0.5}}
    check_federation(tiny_experiment(registry(), trainer="calfat", threat=threat))


@pytest.mark.parametrize("has_own", [False, True], ids=["all", "but a group"])
def test_every_client_of_a_federation_trains_by_it(has_own: bool) -> None:
    """But those of a group that has none."""
    groups = [{"ids": 1, "threat": {"by_class": None}}] if has_own else []
    run = experiment("fedpgd", calfat__threat__by_class={"alpha": 0.5, "warmup": 0}, calfat__clients=groups)
    seen = {client: task.by_class for client, task in tasks_of(Federation(run)).items()}
    own = ByClassOptions(alpha=0.5, warmup=0)
    assert seen == {client: None if has_own and client == 1 else own for client in range(run.num_clients)}
