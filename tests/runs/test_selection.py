"""Which round's model is kept as the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calfat_plugin.entries import AggregatorEntry
from calfat_plugin.report import write_run_report
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs.checkpoints import load_checkpoint
from tests.report.made import made_run
from tests.runs.remains import read_rows

# The best rounds are 2 by natural accuracy, 1 by FGSM, 3 by PGD-20; round 4 equals round 3.
ROUNDS = [
    {"natural": 0.5, "fgsm": 0.4, "pgd20": 0.1},
    {"natural": 0.7, "fgsm": 0.3, "pgd20": 0.2},
    {"natural": 0.6, "fgsm": 0.2, "pgd20": 0.3},
    {"natural": 0.6, "fgsm": 0.1, "pgd20": 0.3},
]


@pytest.mark.parametrize(
    ("attacks", "evaluator", "round", "accuracy"),
    [("fgsm, pgd20", "pgd20", 3, 0.3), ("pgd20, fgsm", "fgsm", 1, 0.4), ("pgd20, natural", "pgd20", 3, 0.3)],
)
def test_best_robust_is_by_the_last_attack(
    tmp_path: Path, attacks: str, evaluator: str, round: int, accuracy: float
) -> None:
    labels = attacks if "natural" in attacks else f"natural, {attacks}"
    seen = [{label: row[label] for label in labels.split(", ")} for row in ROUNDS]
    run = made_run(tmp_path / "run", f"calfat.monitor.evaluators=[{labels}]", rounds=seen, final={"natural": 0.6})
    selected = json.loads((run / "results.json").read_text())["test_selected"]
    assert selected == {
        "best-natural": {
            "round": 2,
            "evaluator": "natural",
            "accuracy": 0.7,
            "checkpoint": "checkpoints/best-natural.safetensors",
        },
        "best-robust": {
            "round": round,
            "evaluator": evaluator,
            "accuracy": accuracy,
            "checkpoint": "checkpoints/best-robust.safetensors",
        },
    }
    assert load_checkpoint(run / "checkpoints/best-robust.safetensors")[0].round == round


@pytest.mark.usefixtures("no_figures")
def test_what_a_validation_split_selected_is_called_so_and_the_test_splits_is_no_fair_result(tmp_path: Path) -> None:
    both = [{label: row[label] for label in ("natural", "pgd20")} for row in ROUNDS[:2]]
    page = write_run_report(made_run(tmp_path / "plain", rounds=both, final={"natural": 0.6})).read_text()
    assert "Best rounds, selected on the test split and so no fair result: natural 70.0 % in round 2" in plain(page)
    assert "alidation split" not in page
    run = made_run(tmp_path / "run", "data_args.validation_share=0.1", rounds=both, final={"natural": 0.6})
    results = json.loads((run / "results.json").read_text())
    assert "test_selected" not in results
    assert results["validation_selected"]["best-natural"]["round"] == 2
    notes = load_checkpoint(run / "checkpoints/best-natural.safetensors")[1]
    assert notes["selected_on"] == "validation split, natural (validation-selected)"
    page = write_run_report(run).read_text()
    assert "Best rounds on the validation split: natural 70.0 % in round 2 and pgd20 20.0 % in round 2." in plain(page)
    assert "no fair result" not in page
    assert "On the validation split." in page


def plain(page: str) -> str:
    return page.replace("\u00a0", " ")


def test_an_aggregator_that_looks_at_validation_images_has_not_seen_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AggregatorEntry, "uses_monitored_data", property(lambda entry: True, lambda entry, value: None))
    for share, codes in (("0", ["test-images-used"]), ("0.1", [])):
        run = made_run(tmp_path / share, f"data_args.validation_share={share}", final={"natural": 0.6})
        assert [alarm["code"] for alarm in json.loads((run / "results.json").read_text())["alarms"]] == codes


def test_without_a_number_no_round_is_the_best_and_the_results_say_so(tmp_path: Path) -> None:
    seen: list[dict[str, float | None]] = [{"natural": 0.5, "apgd-t": None}, {"natural": 0.4, "apgd-t": None}]
    run = made_run(tmp_path / "run", "calfat.monitor.evaluators=[natural, apgd-t]", rounds=seen, final={"natural": 0.6})
    results = json.loads((run / "results.json").read_text())
    assert list(results["test_selected"]) == ["best-natural"]
    assert not (run / "checkpoints/best-robust.safetensors").exists()
    assert results["alarms"] == [
        {
            "code": "not-run",
            "text": "2 rounds, the last of them 2: apgd-t did not run: its loss needs 4 classes, and there are 3. "
            "There is no number of it in these rounds, and no checkpoint best-robust where it is the last attack of "
            "calfat.monitor.evaluators. Monitor another attack.",
            "labels": [],
        }
    ]
    rows = read_rows(run / "rounds.csv")
    assert [(row["natural"], row["apgd-t"], row["apgd-t_release"]) for row in rows] == [
        ("0.5", "", ""),
        ("0.4", "", ""),
    ]
    records = read_rounds(run / "rounds.jsonl")
    why = "its loss needs 4 classes, and there are 3"
    assert [record.evaluations["apgd-t"].not_run for record in records] == [why] * 2
    assert records[0].evaluations["natural"].not_run == ""


def test_an_attack_without_a_number_in_some_rounds_is_judged_by_the_others(tmp_path: Path) -> None:
    seen: list[dict[str, float | None]] = [{"natural": 0.5, "internal": 0.1}, {"natural": 0.4, "internal": None}]
    run = made_run(tmp_path / "run", "calfat.monitor.evaluators=[natural, internal]", rounds=seen, final={"natural": 1})
    results = json.loads((run / "results.json").read_text())
    assert results["test_selected"]["best-robust"]["round"] == 1
    assert results["alarms"][-1]["text"].startswith("round 2: internal did not run: ")
