"""What a collector keeps while attacks run."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.evaluators.alarms import find_alarms
from calfat_plugin.evaluators.base import fixed_subset
from calfat_plugin.evaluators.evidence import Collector, Evidence
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import ThreatModel
from tests.evaluators.tasks import task_of

N, SIZE = 40, 4 * 16  # images, bytes of one
CPU = torch.device("cpu")
THREAT = ThreatModel("linf", "0.1")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()


@pytest.fixture
def data(model: nn.Module) -> ImageData:
    """Images whose labels are what the model says, but for every eighth."""
    x = torch.rand(N, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    y = model(x).argmax(dim=1)
    y[::8] = (y[::8] + 1) % 3
    return ImageData(x, y)


def pgd(**options: object) -> PGD:
    return PGD(PGDOptions(**{"steps": 5, **options}))  # type: ignore[arg-type]


def collected(
    model: nn.Module,
    data: ImageData,
    evaluators: Iterable[tuple[str, Evaluator]],
    room: int = 10**6,
    scratch: Path | None = None,
) -> tuple[Collector, dict[str, EvaluationResult]]:
    """What is kept of these evaluators, and what they measured."""
    task = task_on(model, data, scratch)
    collector = Collector(task, room, scratch)
    return collector, measure(task, evaluators, collector=collector)


def task_on(model: nn.Module, data: ImageData, scratch: Path | None) -> EvaluationTask:
    return task_of(model, data, num_classes=3, threat=THREAT, batch_size=16, scratch=scratch)


def check(evidence: Evidence, model: nn.Module, data: ImageData) -> None:
    """Everything that was right, is covered and got broken has an image in the ball that the model gets wrong."""
    THREAT.check(evidence.x_adv, data.x[evidence.index], who="evidence")
    assert torch.equal(model(evidence.x_adv).argmax(dim=1), evidence.prediction)
    assert bool((evidence.prediction != data.y[evidence.index]).all())
    broken = torch.stack([*evidence.broken.values()]).any(dim=0) & evidence.correct
    assert evidence.index.tolist() == [at for at in evidence.covered.tolist() if broken[at]]


def test_every_image_that_is_broken_is_kept(model: nn.Module, data: ImageData) -> None:
    collector, results = collected(model, data, [("weak", pgd(steps=1)), ("strong", pgd(restarts=3))])
    evidence = collector.evidence()
    check(evidence, model, data)
    assert 0 < len(evidence.index) < int(evidence.correct.sum())
    for label, result in results.items():
        tried, right = evidence.withstand([label])
        assert bool(tried.all())
        assert int(right.sum()) == round(result.accuracy * N)
    worst = collector.evidence().worst_case(3)
    assert worst is not None
    assert round(worst.accuracy * N) == int(evidence.withstand(["weak", "strong"])[1].sum())
    assert worst.accuracy <= min(result.accuracy for result in results.values())


def test_little_room_covers_the_random_part_that_max_examples_takes(model: nn.Module, data: ImageData) -> None:
    collector, _ = collected(model, data, [("some", pgd(max_examples=20)), ("all", pgd(steps=2))], room=10 * SIZE + 1)
    evidence = collector.evidence()
    check(evidence, model, data)
    few, some = fixed_subset(N, 10), fixed_subset(N, 20)
    assert evidence.covered.tolist() == few.tolist()
    assert evidence.tried["some"].nonzero().flatten().tolist() == some.tolist()
    worst = collector.evidence().worst_case(3)
    assert worst is not None
    assert worst.num_examples == 20
    said = evidence.as_json()
    broken = (evidence.broken["some"] | evidence.broken["all"]) & evidence.correct
    assert (said["images"], said["covered"], said["kept"]) == (N, 10, len(evidence.index))
    assert said["left_out"] == int(broken.sum()) - len(evidence.index) > 0


def test_no_room_keeps_verdicts_alone(model: nn.Module, data: ImageData) -> None:
    evidence = collected(model, data, [("pgd", pgd())], room=SIZE - 1)[0].evidence()
    assert (len(evidence.covered), len(evidence.index), evidence.x_adv.shape) == (0, 0, (0, 1, 4, 4))
    assert int(evidence.broken["pgd"].sum()) > 0
    assert evidence.worst_case(3) is None  # of a single attack


def test_an_attack_with_a_wider_ball_has_no_part(model: nn.Module, data: ImageData) -> None:
    collector, _ = collected(
        model, data, [("wide", pgd(eps=Fraction("0.3"))), ("pgd", pgd()), ("small", pgd(eps=Fraction("0.05")))]
    )
    evidence = collector.evidence()
    check(evidence, model, data)
    assert [*evidence.tried] == ["pgd", "small"]
    assert evidence.attacks == ("wide", "pgd", "small")


class Boasting(Evaluator):
    """Shows the examples of PGD, and says another accuracy."""

    gives_examples = True

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        import dataclasses

        return dataclasses.replace(pgd().evaluate(task, label), accuracy=1.0)


def test_an_evaluator_whose_accuracy_is_not_that_of_its_examples_has_no_part_and_says_so(
    model: nn.Module, data: ImageData
) -> None:
    collector, results = collected(
        model, data, [("boast", Boasting()), ("pgd", pgd()), ("wide", pgd(eps=Fraction("0.3")))]
    )
    assert [*collector.evidence().tried] == ["pgd"]
    assert collector.evidence().worst_case(3) is None
    right = round(results["pgd"].accuracy * N)
    (found,) = [one for result in results.values() for one in result.details.get("warnings", ())]
    assert (found["code"], found in results["boast"].details["warnings"]) == ("recount", True)
    assert found["text"].startswith(f"it says that {N} of {N} images withstand it, but {right} withstand the ")


def test_what_a_killed_process_showed_is_read_again(model: nn.Module, data: ImageData, tmp_path: Path) -> None:
    whole = collected(model, data, [("a/b", pgd(steps=1)), ("pgd", pgd())], scratch=tmp_path)[0].evidence()
    for journal in tmp_path.glob("*.bin"):  # the last image of each is written by half, then the process is killed
        journal.write_bytes(journal.read_bytes()[: -SIZE // 2])
    again = Collector(task_on(model, data, tmp_path), 10**6, tmp_path).evidence()
    assert again.attacks == whole.attacks == ("a/b", "pgd")
    missing = set(whole.index.tolist()) - set(again.index.tolist())
    assert len(missing) <= 2
    check(Evidence(**{**vars(again), "tried": whole.tried, "broken": {"a": _kept(again)}}), model, data)
    assert all(len(journal.read_bytes()) % (8 + SIZE) == 0 for journal in tmp_path.glob("*.bin"))


def _kept(evidence: Evidence) -> Tensor:
    broken = torch.zeros(N, dtype=torch.bool)
    broken[evidence.index] = True
    return broken


def test_a_journal_of_other_weights_or_data_is_not_read(model: nn.Module, data: ImageData, tmp_path: Path) -> None:
    """Its images lie in no ball around these, as if the attack had one of its own and so no part in the worst case."""
    collected(model, data, [("pgd", pgd())], scratch=tmp_path)
    turned = ImageData(data.x.flip(3), data.y)
    evidence = collected(model, turned, [("pgd", pgd())], scratch=tmp_path)[0].evidence()
    assert [*evidence.tried] == ["pgd"]
    check(evidence, model, turned)
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    assert Collector(task_on(model, data, tmp_path), 10**6, tmp_path).evidence().attacks == ()


class Idle(Evaluator):
    """An attack that cannot run here."""

    gives_examples = True

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        return EvaluationResult.without_number(label, "it wants more", settings={}, implementation="idle")


def test_an_attack_that_did_not_run_has_no_part_in_the_worst_case_which_names_it(
    model: nn.Module, data: ImageData
) -> None:
    collector, results = collected(model, data, [("idle", Idle()), ("pgd", pgd())])
    evidence = collector.evidence()
    assert [*evidence.tried] == ["pgd"]
    worst = evidence.worst_case(3, collector.not_run)
    assert worst is not None
    assert worst.accuracy == results["pgd"].accuracy
    assert worst.settings["attacks"] == ["pgd"]
    assert [alarm.text for alarm in find_alarms([worst])] == ["worst-case is of pgd alone, because idle did not run."]


def test_where_no_attack_ran_the_worst_case_has_no_number(model: nn.Module, data: ImageData) -> None:
    collector, _ = collected(model, data, [("idle", Idle()), ("lazy", Idle())])
    worst = collector.evidence().worst_case(3, collector.not_run)
    assert worst is not None
    assert (worst.accuracy, worst.not_run) == (None, "none of its attacks ran (idle, lazy)")
    alone, _ = collected(model, data, [("idle", Idle())])
    assert alone.evidence().worst_case(3, alone.not_run) is None  # of a single attack
