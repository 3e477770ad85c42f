"""AutoAttack through us against pyautoattack called by hand, and going on after an interruption."""

from __future__ import annotations

import copy
import dataclasses
import errno
import itertools
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyautoattack
import pytest
import torch
from torch import nn

from calfat_plugin import disk
from calfat_plugin.builtin import calfat_evaluators
from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import BudgetError, ModelError, OptionError, RunError
from calfat_plugin.evaluators.alarms import find_alarms
from calfat_plugin.evaluators.autoattack import AttackState, AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.subattacks import PUBLISHED, SubAttacks, playable
from calfat_plugin.options import parse_options
from calfat_plugin.report.run_tables import evaluations_table
from calfat_plugin.threat import ThreatModel

SEED = 5
QUICK = {"iterations": 3, "queries": 20}
ENTRIES = {entry.name: entry for entry in calfat_evaluators()}


def by_hand(
    model: nn.Module, data: ImageData, threat: ThreatModel, batch_size: int, version: str, **changes: Any
) -> list[bool]:
    """Verdicts of pyautoattack's own call; parameters keep their gradients, as a user's script would have it."""
    attack = pyautoattack.AutoAttack(
        model,
        norm={"linf": "Linf", "l2": "L2", "l1": "L1"}[threat.norm],
        eps=float(threat.eps),
        seed=SEED,
        version=version,
        attacks=changes.get("attacks"),
    )
    for part in (attack.apgd, attack.apgd_targeted, attack.fab):
        part.n_iter = part.n_iter_orig = changes.get("iterations", part.n_iter)
    for part in (attack.apgd_targeted, attack.fab):
        part.n_target_classes = min(part.n_target_classes, changes.get("targets", 9))
    attack.square.n_queries = changes.get("queries", attack.square.n_queries)
    x_adv, _ = attack.run_standard_evaluation(data.x, data.y, batch_size=batch_size)
    with torch.no_grad():
        return (model(x_adv).argmax(1) == data.y).tolist()


def linear(classes: int) -> tuple[nn.Module, ImageData]:
    """A model that adds up each class's pixels of 4 x 4, and images that it gets right by a hair."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, classes, bias=False)).eval()
    of_class = torch.arange(16)[None] % classes == torch.arange(classes)[:, None]
    with torch.no_grad():
        model[1].weight.copy_(of_class.float())
    y = torch.arange(12) % classes
    return model, ImageData(0.4 + 0.1 * of_class[y].float().reshape(12, 1, 4, 4), y)


def through_us(task, scratch: Path, **options: Any):
    """(verdicts, result); the verdicts are read from the state that is left until somebody removes it."""
    result = AutoAttack(AutoAttackOptions(seed=SEED, **options)).evaluate(task_in(task, scratch), "autoattack")
    (state,) = scratch.glob("*.json")
    return [bit == "1" for bit in json.loads(state.read_text())["robust"]], result


def task_in(task, scratch):
    return dataclasses.replace(task, scratch=scratch)


# --- exactly pyautoattack's verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "eps", "version", "attacks"),  # each budget leaves a good part of the images, and breaks as many
    [
        ("linf", 0.15, "standard", None),
        ("l2", 0.6, "standard", None),
        ("l1", 1.5, "standard", None),
        ("linf", 0.15, "plus", None),
        ("linf", 0.15, "rand", None),
        ("linf", 0.3, "custom", "square"),
        ("l1", 2, "custom", "apgd-dlr, square"),  # without the larger radii that come first in the standard version
        ("linf", 0.15, "custom", "fab-t, fab, apgd-dlr"),  # fab-t leaves fab one restart instead of five
    ],
)
def test_the_verdicts_are_pyautoattacks_on_digits(
    norm, eps, version, attacks, digits_model, digits, make_task, tmp_path, few_targets
):
    data = digits.subset(range(30))
    threat = ThreatModel(norm, eps, 0.05)
    task = make_task(digits_model, data, threat=threat, batch_size=16)
    verdicts, result = through_us(task, tmp_path, version=version, attacks=attacks, **QUICK)
    names = None if attacks is None else [name.strip() for name in attacks.split(",")]

    assert verdicts == by_hand(digits_model, data, threat, 16, version, attacks=names, targets=few_targets, **QUICK)
    assert result.accuracy == result.accuracy_release == sum(verdicts) / len(verdicts)
    assert 0 < sum(verdicts) < int(task.clean_correct.sum())


@pytest.mark.parametrize(
    ("norm", "targets"), [("linf", 9), *(pytest.param(norm, 2, marks=pytest.mark.slow) for norm in ("l2", "l1"))]
)
def test_the_verdicts_are_pyautoattacks_on_colour_images(
    norm, targets, colour_model, colour_digits, make_task, tmp_path, monkeypatch
):
    monkeypatch.setitem(PUBLISHED, "targets", targets)
    threat = ThreatModel(norm, {"linf": "8/255", "l2": 0.5, "l1": 3}[norm], "2/255")
    task = make_task(colour_model, colour_digits, threat=threat, batch_size=12)
    verdicts, _ = through_us(task, tmp_path, **QUICK)
    assert verdicts == by_hand(colour_model, colour_digits, threat, 25, "standard", targets=targets, **QUICK)
    assert 0 < sum(verdicts) < int(task.clean_correct.sum())


@pytest.mark.slow
def test_the_verdicts_are_pyautoattacks_at_full_strength(digits_model, digits, make_task, tmp_path):
    data = digits.subset(range(48))
    threat = ThreatModel(eps=0.1, step_size=0.025)
    verdicts, result = through_us(make_task(digits_model, data, threat=threat, batch_size=20), tmp_path)
    assert verdicts == by_hand(digits_model, data, threat, 20, "standard")
    assert result.details["warnings"] == []


def test_torchs_global_stream_and_the_tracer_are_left_as_they_were(
    digits_model, digits, make_task, tmp_path, few_targets
):
    def tracer(frame, event, argument):
        return None

    digits_model.zero_grad()
    before, traced = torch.get_rng_state(), sys.gettrace()
    sys.settrace(tracer)
    try:
        through_us(make_task(digits_model, digits.subset(range(8))), tmp_path, **QUICK)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(traced)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in digits_model.parameters())


# --- what is reported -------------------------------------------------------------------------------------------------


def test_sub_attacks_are_reported_one_by_one(digits_model, digits, make_task, tmp_path, monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)  # a second passes from look to look
    monkeypatch.setattr("calfat_plugin.evaluators.autoattack.time", clock)
    data = digits.subset(range(40))
    task = make_task(digits_model, data, threat=ThreatModel(eps=0.15, step_size=0.05), batch_size=16)
    verdicts, result = through_us(task, tmp_path, **QUICK)
    rows = result.details["sub_attacks"]
    assert [row["name"] for row in rows] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    left = [int(task.clean_correct.sum()), *(round(40 * row["accuracy"]) for row in rows)]
    assert left == sorted(left, reverse=True)
    assert [row["attacked"] for row in rows] == left[:-1]
    assert rows[-1]["accuracy"] == result.accuracy == sum(verdicts) / 40
    assert [row["restarts"] for row in rows] == [1, 1, 1, 1]
    assert min(row["seconds"] for row in rows) > 0
    assert sum(row["seconds"] for row in rows) == result.seconds + 1  # the clock is read once more for the last row
    assert result.implementation == "pyautoattack 0.2.0"
    assert result.per_class == result.per_class_release
    assert result.settings.pop("counting").endswith("counts an example as broken once any sub-attack has broken it")
    assert result.settings == {
        **{
            "norm": "linf",
            "eps": "0.15",
            "attack": "autoattack",
            "version": "standard",
            "batch_size": 16,
            "seed": SEED,
        },
        **{"iterations": 3, "queries": 20, "target_classes": 9, "sub_attacks": [row["name"] for row in rows]},
    }
    json.dumps([result.settings, result.details], allow_nan=False)


def test_progress_only_grows_and_ends_at_all_examples_times_sub_attacks(digits_model, digits, make_task, tmp_path):
    seen: list[tuple[int, int, int]] = []
    task = make_task(digits_model, digits.subset(range(30)), batch_size=8, on_progress=lambda *told: seen.append(told))
    _, result = through_us(task, tmp_path, **QUICK)
    done = [told[0] for told in seen]
    assert done == sorted(set(done))
    assert len(done) > 40  # also inside a batch
    assert {told[1] for told in seen} == {4 * 30}
    assert seen[-1] == (120, 120, round(120 * result.accuracy))


@pytest.mark.parametrize("name", ["apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square"])
def test_each_sub_attack_is_an_evaluator_of_its_own(name, digits_model, digits, make_task):
    entry = ENTRIES[name]
    evaluator = entry.load()(entry.config(**QUICK, max_examples=6))
    result = evaluator.evaluate(make_task(digits_model, digits, seed=11), name)
    assert (result.num_examples, result.settings["seed"]) == (6, 11)  # the run's seed, as none is given
    assert (result.settings["sub_attacks"], result.settings["version"]) == ([name], "custom")


# --- findings ---------------------------------------------------------------------------------------------------------


def codes(model: nn.Module, data: ImageData, make_task, **options: Any) -> dict[str, str]:
    task = make_task(model.eval(), data, num_classes=options.pop("num_classes", 10))
    result = AutoAttack(AutoAttackOptions(**{**QUICK, **options})).evaluate(task, "aa")
    return {warning["code"]: warning["text"] for warning in result.details["warnings"]}


class Odd(nn.Module):
    """The digits model, with something odd about its answers."""

    def __init__(self, model: nn.Module, answer: Any) -> None:
        super().__init__()
        self.model, self.answer = model, answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.model, x)


def purify(model, x):
    with torch.enable_grad():
        inner = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inner).logsumexp(1).sum(), inner)
    return model(x + 0.01 * gradient.sign())


def test_a_randomised_and_a_dynamic_model_are_reported_and_the_next_one_is_not_blamed(
    digits_model, digits, make_task, snapshot, few_targets
):
    randomised = Odd(digits_model, lambda model, x: model(x + 0.05 * torch.randn_like(x)))
    data = digits.subset(range(6))
    snapshot(codes(randomised, data, make_task)["randomised"])
    assert "randomised" not in codes(randomised, data, make_task, version="rand", iterations=2)
    snapshot(codes(Odd(digits_model, purify), data, make_task)["dynamic"])
    assert list(codes(digits_model, data, make_task).items()) == [  # fewer iterations and queries
        ("not-published", "3 iterations instead of 100, 20 queries instead of 5000: this is not the published attack.")
    ]


def test_zero_gradients_and_a_square_that_helps_are_reported(digits_model, digits, make_task):
    # Rounded pixels have no gradient at all, so only Square can break anything.
    odd = Odd(digits_model, lambda model, x: model((8 * x).round() / 8 + 0 * x))
    task = make_task(odd.eval(), digits.subset(range(40)), threat=ThreatModel(eps=0.3, step_size=0.1))
    options = AutoAttackOptions(version="custom", attacks="apgd-dlr, square", iterations=2, queries=150)
    result = AutoAttack(options).evaluate(task, "aa")
    found = {warning["code"]: warning["text"] for warning in result.details["warnings"]}
    assert " starts of APGD's DLR loss had a gradient of exactly zero, from which gr" in found["zero-gradients"]
    assert found["zero-gradients"].split()[0].isdigit()
    assert found["square-helps"].startswith("Square, which uses no gradients, broke examples")


@pytest.mark.parametrize(
    ("classes", "ran", "told"),
    [
        (5, ["apgd-ce", "apgd-t", "fab-t", "square"], {"few-classes"}),
        (3, ["apgd-ce", "fab-t", "square"], {"few-classes", "not-run"}),
        (2, ["apgd-ce", "fab-t", "square"], {"few-classes", "not-run"}),
    ],
)
def test_fewer_classes_than_targets(classes, ran, told, make_task, snapshot):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, classes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.rand(12, 1, 5, 5, generator=generator)
        y = model(x).argmax(1)
    task = make_task(model, ImageData(x, y), num_classes=classes)
    result = AutoAttack(AutoAttackOptions(**QUICK)).evaluate(task, "aa")
    found = {warning["code"]: warning["text"] for warning in result.details["warnings"]}
    assert result.settings["sub_attacks"] == ran
    assert found.keys() - {"not-published", "square-helps"} == told
    snapshot(found["few-classes"])
    if "not-run" in told:
        snapshot(found["not-run"])


@pytest.mark.parametrize(
    ("name", "classes", "norm", "why"),
    [
        ("apgd-dlr", 2, "linf", "its loss needs 3 classes, and there are 2"),
        ("apgd-t", 2, "linf", "its loss needs 4 classes, and there are 2"),
        ("apgd-t", 3, "linf", "its loss needs 4 classes, and there are 3"),
        ("square", 3, "l2", "in L2 it needs images of 5 pixels a side, and these have 4"),
        ("square", 3, "l1", "in L1 it needs images of 5 pixels a side, and these have 4"),
    ],
)
def test_an_attack_that_cannot_run_has_no_number(name, classes, norm, why, make_task):
    """Clean accuracy would pass for robustness."""
    model, data = linear(classes)
    task = make_task(model, data, num_classes=classes, threat=ThreatModel(norm, "0.1"))
    entry = ENTRIES[name]
    result = entry.build(entry.config()).evaluate(task, name)
    assert (result.accuracy, result.accuracy_release, result.not_run) == (None, None, why)
    assert (result.num_examples, result.per_class, result.per_class_release) == (0, (), ())
    assert (result.interval, result.worst_class, result.guess) == (None, None, None)
    assert [(alarm.code, alarm.text) for alarm in find_alarms([result])] == [
        ("not-run", f"{name} did not run, so it has no number: {why}.")
    ]


def test_autoattack_of_parts_that_cannot_run_has_no_number_and_names_them_all(make_task):
    model, data = linear(2)
    options = AutoAttackOptions(version="custom", attacks="apgd-t, apgd-dlr")
    result = AutoAttack(options).evaluate(make_task(model, data, num_classes=2), "aa")
    assert result.accuracy is None
    assert result.not_run == (
        "apgd-t: its loss needs 4 classes, and there are 2; apgd-dlr: its loss needs 3 classes, and there are 2"
    )


def test_autoattack_without_some_parts_has_a_number_and_says_which_did_not_run(make_task):
    model, data = linear(2)
    options = AutoAttackOptions(version="custom", attacks="apgd-ce, apgd-t", **QUICK)
    result = AutoAttack(options).evaluate(make_task(model, data, num_classes=2), "aa")
    assert 0 <= result.accuracy < 1
    assert result.not_run == ""
    assert result.details["not_run"] == {"apgd-t": "its loss needs 4 classes, and there are 2"}
    (row,) = evaluations_table("", [result]).rows
    assert row[0].beside == ["linf, eps 0.1", "without apgd-t"]


def test_within_eps_0_nothing_needs_to_run(make_task):
    """The clean image is the only point, so clean accuracy is the number."""
    model, data = linear(3)
    result = AutoAttack(AutoAttackOptions()).evaluate(
        make_task(model, data, num_classes=3, threat=ThreatModel("linf", 0)), "aa"
    )
    assert (result.accuracy, result.not_run) == (1.0, "")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_in_training_mode_is_refused(digits_model, digits, make_task):
    task = make_task(Odd(digits_model, lambda model, x: model(x)), digits.subset(range(4)))
    with pytest.raises(ModelError, match=r"the model is in training mode \(module 'Odd'\)"):
        AutoAttack(AutoAttackOptions()).evaluate(task, "aa")


def test_a_sub_attack_outside_the_budget_is_caught_by_name(digits_model, digits, make_task, monkeypatch):
    monkeypatch.setattr(SubAttacks, "perturb", lambda self, x, y: (x + 0.5).clamp(0, 1))
    with pytest.raises(BudgetError, match=r"^evaluator 'aa' \(apgd-ce\): .* left the linf ball of eps 0\.1"):
        AutoAttack(AutoAttackOptions()).evaluate(make_task(digits_model, digits), "aa")


@pytest.mark.parametrize(
    "options",
    [
        {"version": "custom"},
        {"attacks": "square"},
        {"version": "custom", "attacks": "apgd-ce, sqare"},
        {"version": "custom", "attacks": "square,square"},
        {"version": "standart"},
        {"eps": 8},
    ],
)
def test_options_that_make_no_sense_are_reported(options, snapshot):
    with snapshot.raises(OptionError, list(options)[-1]):
        parse_options(
            AutoAttackOptions,
            options,
            owner="autoattack",
            fail=lambda at, reason: OptionError(f"{at[0]}: {reason}" if at else reason),
        )


# --- going on after an interruption -----------------------------------------------------------------------------------


class StoppedError(Exception):
    """What a test interrupts with."""


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours into an evaluation it is no bug, and what was noted before is still there."""

    def no_room(paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state, path = AttackState(torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)), tmp_path / "state.json"
    state.save(path, "digest")
    before = path.read_text()
    monkeypatch.setattr(disk, "put_in_place", no_room)
    with pytest.raises(RunError, match=r"state\.json: cannot be written \(No space left on device\)"):
        state.save(path, "another")
    assert path.read_text() == before


def interrupted_after(task, scratch, batches, **options):
    """Evaluate until so many batches are done; returns the number of batches done, all of them in the end."""
    done = []
    whole = SubAttacks.perturb

    def counting(self, x, y):
        if batches is not None and len(done) == batches:
            raise StoppedError
        done.append(len(x))
        return whole(self, x, y)

    SubAttacks.perturb = counting
    try:
        return len(done), through_us(task, scratch, **options), done
    except StoppedError:
        return len(done), None, done
    finally:
        SubAttacks.perturb = whole


def test_it_continues_after_the_last_batch(digits_model, digits, make_task, tmp_path, few_targets):
    task = make_task(
        digits_model, digits.subset(range(30)), threat=ThreatModel(eps=0.15, step_size=0.05), batch_size=16
    )
    _, (verdicts, result), all_batches = interrupted_after(task, tmp_path / "whole", None, **QUICK)
    for stops in ((1,), (2, 1, 1)):
        scratch, pieces = tmp_path / f"{len(stops)} stops", []
        for stop in stops:
            count, found, done = interrupted_after(task, scratch, stop, **QUICK)
            assert (count, found) == (stop, None)
            pieces += done
        _, found, done = interrupted_after(task, scratch, None, **QUICK)
        again, resumed = found
        assert pieces + done == all_batches  # no batch twice, none left out, each of the same examples
        assert again == verdicts
        assert resumed.per_class == result.per_class
        assert resumed.details["warnings"] == result.details["warnings"]
        strip = [{key: row[key] for key in row if key != "seconds"} for row in result.details["sub_attacks"]]
        assert [{key: row[key] for key in row if key != "seconds"} for row in resumed.details["sub_attacks"]] == strip


def test_what_a_killed_process_had_broken_leaves_no_image_out(make_task, tmp_path, monkeypatch):
    """A later sub-attack goes on through what it began with, although its first batch has broken two of these."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 2)).eval()
    with torch.no_grad():  # class 0 where the mean pixel is above one half
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 25))
        model[1].bias.copy_(torch.tensor([-12.5, 12.5]))
    data = ImageData(torch.full((6, 1, 5, 5), 0.55), torch.zeros(6, dtype=torch.int64))
    task = make_task(model, data, threat=ThreatModel(eps="0.2", step_size="0.1"), num_classes=2, batch_size=2)
    calls = []

    def perturb(self, x, y):
        calls.append(len(x))
        if len(calls) == 5:
            raise StoppedError
        return x if len(calls) < 4 else x - 0.1

    monkeypatch.setattr(SubAttacks, "perturb", perturb)
    options = {"version": "custom", "attacks": "apgd-ce, square", **QUICK}
    with pytest.raises(StoppedError):
        through_us(task, tmp_path, **options)
    verdicts, _ = through_us(task, tmp_path, **options)
    assert calls == [2] * 3 + [2, 2] + [2] * 2
    assert verdicts == [False] * 6


def test_what_depends_on_the_order_survives_an_interruption(digits_model, digits, make_task, tmp_path, few_targets):
    # fab after fab-t has one restart, also when another process did fab-t.
    options = {"version": "custom", "attacks": "fab-t, fab", **QUICK}
    task = make_task(digits_model, digits.subset(range(16)), threat=ThreatModel(eps=0.15, step_size=0.05), batch_size=8)
    _, (verdicts, _), _ = interrupted_after(task, tmp_path / "whole", None, **options)
    interrupted_after(task, tmp_path / "pieces", 2, **options)
    _, (again, result), done = interrupted_after(task, tmp_path / "pieces", None, **options)
    assert again == verdicts
    assert len(done) <= 2
    assert [row["restarts"] for row in result.details["sub_attacks"]] == [1, 1]


def test_a_finished_attack_is_not_repeated(digits_model, digits, make_task, tmp_path, few_targets):
    task = make_task(digits_model, digits.subset(range(10)))
    first, _ = through_us(task, tmp_path, **QUICK)
    _, (second, _), done = interrupted_after(task, tmp_path, None, **QUICK)
    assert (second, done) == (first, [])


def _other_weights(task):
    with torch.no_grad():
        next(task.model.parameters()).add_(1e-6)


def _other_data(task, **changes):
    return dataclasses.replace(task, data=dataclasses.replace(task.data, **changes))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (_other_weights, {}),
        (lambda task: task.model.shift.add_(1) and None, {}),  # outside the state dict
        (lambda task: _other_data(task, x=task.data.x * 0.999), {}),
        (lambda task: _other_data(task, y=torch.cat([task.data.y[:-1], 1 - task.data.y[-1:].clamp(0, 1)])), {}),
        (lambda task: dataclasses.replace(task, threat=ThreatModel(eps=0.11)), {}),
        (lambda task: None, {"batch_size": 3}),
        (lambda task: None, {"queries": 21}),
        (lambda task: None, {"seed": SEED + 1}),
    ],
)
def test_another_model_data_or_setting_never_takes_over_the_state(
    change, options, digits_model, digits, make_task, tmp_path
):
    model = nn.Sequential(copy.deepcopy(digits_model)).eval()
    model.register_buffer("shift", torch.zeros(1), persistent=False)
    task = make_task(model, digits.subset(range(6)))
    same: dict[str, Any] = {"version": "custom", "attacks": "square", "seed": SEED, **QUICK}
    AutoAttack(AutoAttackOptions(**same)).evaluate(task_in(task, tmp_path), "autoattack")
    other = change(task) or task
    AutoAttack(AutoAttackOptions(**{**same, **options})).evaluate(task_in(other, tmp_path), "autoattack")
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"format": "calfat-attack-1"}', "[]", '"text"'])
def test_a_damaged_state_is_left_aside(damage, digits_model, digits, make_task, tmp_path, caplog):
    task = make_task(digits_model, digits.subset(range(6)))
    options = {"version": "custom", "attacks": "square", **QUICK}
    verdicts, _ = through_us(task, tmp_path, **options)
    (state,) = tmp_path.glob("*.json")
    state.write_text(damage)
    with caplog.at_level(logging.WARNING):
        again, _ = through_us(task, tmp_path, **options)
    assert again == verdicts
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize("iterations", [1, 4])
def test_in_l1_too_few_iterations_are_refused_before_a_run(iterations, snapshot):
    options = AutoAttackOptions(norm="l1", eps=2, iterations=iterations)
    with snapshot.raises(OptionError):
        ENTRIES["autoattack"].check(options, SimpleNamespace(threat=ThreatModel()))
    for fine in (dataclasses.replace(options, iterations=5), dataclasses.replace(options, norm="l2")):
        ENTRIES["autoattack"].check(fine, SimpleNamespace(threat=ThreatModel()))


@pytest.mark.parametrize(("norm", "targets"), [("l1", 5), ("l2", 9)])
def test_apgd_t_has_the_published_targets_of_the_norm(norm, targets, digits_model, digits, make_task):
    task = make_task(digits_model, digits)
    settings = {"version": "standard", "sub_attacks": ["apgd-t"], "iterations": 10, "queries": 20}
    attacks = SubAttacks(task, ThreatModel(norm, 2), {**settings, "target_classes": 9, "seed": 0}, lambda calls: None)
    attacks.configure("apgd-t")
    assert attacks.forward_passes("apgd-t") == 1 + targets * (1 + 11)


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_square_needs_images_of_five_pixels(norm):
    names, reasons = playable(("apgd-ce", "square"), ThreatModel(norm, 1), 10, 4)
    why = f"in {norm.upper()} it needs images of 5 pixels a side, and these have 4"
    assert (names, reasons) == (("apgd-ce",), {"square": why})
