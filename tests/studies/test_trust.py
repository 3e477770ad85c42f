"""The benchmark of the verdict runs, and its words are the verdict's."""

from __future__ import annotations

import pytest

from calfat_plugin.judging import verdict
from calfat_plugin.maths.intervals import wilson
from studies.trust import benchmark


@pytest.mark.parametrize("kind", ["RememberingForAll", "Planted", "Plain"])
def test_a_model_is_trained_judged_and_attacked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TRUTH_STEPS", 1)
    monkeypatch.setattr(benchmark, "TRUTH_ITERATIONS", 1)
    found = benchmark.judged(benchmark.Case(kind, "0.1", seed=0, width=2, examples=12, epochs=1))
    assert (found.kind, found.honest) == (kind, kind == "Plain")
    assert 0 <= found.truth <= (1 if found.worst is None else found.worst) <= 1
    assert f"| `{kind}` | 0.1 | " in "\n".join(benchmark.table([found]))


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
