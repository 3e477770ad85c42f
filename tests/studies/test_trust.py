"""The benchmark of the verdict runs, and its words are the verdict's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.judging import verdict
from calfat_plugin.maths.intervals import wilson
from studies.trust import benchmark, models


@pytest.mark.parametrize("kind", ["RememberingForAll", "Planted", "Plain"])
def test_a_model_is_trained_judged_and_attacked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TRUTH_STEPS", 1)
    monkeypatch.setattr(benchmark, "TRUTH_ITERATIONS", 1)
    found = benchmark.judged(benchmark.Case(kind, "0.1", seed=0, width=2, examples=12, epochs=1))
    assert (found.kind, found.honest) == (kind, kind == "Plain")
    assert 0 <= found.truth <= (1 if found.worst is None else found.worst) <= 1
    assert f"| `{kind}` | 0.1 | " in "\n".join(benchmark.table([found]))


class Bright(models.Judged):
    """Class 0 is of images that are brighter than 1/2, class 1 of the others; it hides its gradient."""

    def network(self, width: int) -> nn.Module:
        return nn.Identity()

    def trained(self, x: Tensor) -> Tensor:
        score = 100 * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([score, -score, *[torch.full_like(score, -100)] * 8], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(x.detach()) + 0 * x.sum()


def test_the_truth_is_what_the_attack_on_the_undefended_parts_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four images one is wrong, one can be darkened, and two are out of reach."""
    monkeypatch.setattr(benchmark, "TRUTH_STEPS", 8)
    monkeypatch.setattr(benchmark, "TRUTH_ITERATIONS", 2)
    x = torch.tensor([0.3, 0.55, 0.7, 0.8]).view(4, 1, 1, 1).expand(4, 1, 8, 8).clone()
    case = benchmark.Case("Bright", "0.1", seed=0, width=1)
    assert benchmark.attacked(Bright(1).eval(), x, torch.zeros(4, dtype=torch.int64), case) == 0.5


def test_the_words_are_the_verdicts() -> None:
    found = {
        (count, number): benchmark.word_of(count, number)
        for number in (100, 359, 1000, 8000)
        for count in (0, number // 50, number // 25, number // 20, number // 16, number // 8)
    }
    assert set(found.values()) == {"holds", "not shown", "overstated"}
    for (count, number), word in found.items():
        assert word == verdict.word_of(count / number, wilson(count / number, number))
    assert (benchmark.TOLERANCE, benchmark.SLACK) == (verdict.TOLERANCE, verdict.SLACK)


def test_what_counts_as_false() -> None:
    def found(**changes: object) -> str:
        plain = {"kind": "x", "eps": "0.1", "honest": True, "natural": 0.9, "claimed": 0.8, "worst": 0.7, "truth": 0.8}
        said = {"word": "holds", "usable": True, "text": "", "cause": ""}
        return benchmark.Found(**{**plain, **said, **changes}).false  # type: ignore[arg-type]

    assert (found(), found(truth=0.74)) == ("", "holds")
    assert (found(word="overstated"), found(word="overstated", truth=0.74)) == ("alarm", "")
    assert (found(word="overstated", honest=False), found(word="not robust", usable=False)) == ("", "")
    assert found(word="not shown", cause="images are too few to be sure") == ""
