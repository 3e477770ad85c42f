from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from calfat_plugin.errors import RecipeError
from calfat_plugin.recipe.document import Document
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.suite import Setting, matches, slug
from tests.suites.files import SUITE, write_suite

pytestmark = pytest.mark.usefixtures("in_a_folder")
REPORTED = SUITE + "reported:\n  source: arXiv:2205.14926, Table 1\n"


def parse(tmp_path, text):
    return load_suite(write_suite(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file is empty. Start from the example in docs/suites.md."),
        ("- a\n", "found ['a'] (list) at the top, expected keys such as base: and axes:."),
    ],
)
def test_what_is_no_suite_at_all_is_reported_in_a_suite_s_words(text, complaint, tmp_path):
    with pytest.raises(RecipeError) as caught:
        parse(tmp_path, text)
    assert str(caught.value) == f"tiny.yaml: {complaint}"


def test_a_suite_file_becomes_typed(tmp_path):
    suite = parse(
        tmp_path,
        REPORTED
        + """\
  tolerance: {natural: 3}
  percent:
    CalFAT: {natural: 64.69, pgd20: 31.12}
    FedPGD: {pgd20: 26.74, source: my own run}
skip: {fed*: no time}
""",
    )
    assert (suite.name, suite.title, suite.base_document.file) == ("tiny", "Two methods", "base.yaml")
    assert (str(suite.directory), str(suite.runs_directory)) == ("runs/suites/tiny", "runs/suites/tiny")
    assert suite.seeds == (0, 1)
    assert list(suite.metrics.items()) == [("natural", "natural"), ("pgd20", "PGD-20")]
    assert suite.grid() == [("CalFAT",), ("FedPGD",)]
    assert [(setting.key, setting.value, setting.place) for setting in suite.settings] == [
        ("train_args.comm_round", 1, "tiny.yaml:3")
    ]
    assert [setting.override for setting in suite.settings_of(["FedPGD"])] == [
        "train_args.comm_round=1",
        "calfat.trainer=fedpgd",
    ]
    assert suite.reported.percent["CalFAT"].percent == {"natural": 64.69, "pgd20": 31.12}
    assert suite.reported.source_of("CalFAT") == "arXiv:2205.14926, Table 1"
    assert suite.reported.source_of("FedPGD") == "my own run"
    assert suite.reported.tolerance == {"natural": 3.0}
    assert suite.skip == {"fed*": "no time"}


def test_the_base_is_relative_to_the_suite_file(tmp_path):
    write_suite(tmp_path, SUITE)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "mine.yaml").write_text(SUITE.replace("base.yaml", "../base.yaml"), encoding="utf-8")
    assert load_suite("suites/mine.yaml").base_document.file == "base.yaml"


TEN = ", ".join(f"l{i}: {{}}" for i in range(10))
AXES = SUITE[SUITE.index("axes:") :]
SET, METRICS = "{train_args.comm_round: 1}", "{natural: natural, pgd20: PGD-20}"
SOURCE = "reported:\n  source: arXiv:2205.14926, Table 1\n"
BAD = {  # what is replaced in the suite, or nothing for its end; by what; place of the error
    "unknown key": ("", "titel: x\n", "10: titel"),
    "no base": ("base: base.yaml\n", "", " base"),
    "base missing": ("base.yaml", "bse.yaml", "2: base"),
    "nested set": (SET, "{train_args: {comm_round: 1}}", "3: set.train_args"),
    "set is no mapping": (SET, "[1]", "3: set"),
    "set holds a date": (SET, "{train_args.comm_round: 2026-01-01}", "3: set.train_args.comm_round"),
    "set the seed": ("train_args.comm_round", "common_args.random_seed", "3: set.common_args.random_seed"),
    "overlapping settings": (SET, "{calfat.trainer: a, calfat.trainer.loss: b}", "3: set.calfat.trainer.loss"),
    "no axes": (AXES, "", " axes"),
    "empty axis": ("", "  seedless: {}\n", "10: axes.seedless"),
    "label with a slash": ("FedPGD:", "Fed/PGD:", "9: axes.method.Fed/PGD"),
    "labels with one folder name": ("FedPGD:", "calfat:", "9: axes.method.calfat"),
    "an axis wipes another out": (
        "axes:\n",
        "axes:\n  r:\n    half: {calfat.trainer.adv_ratio: 0.5}\n",
        "11: axes.method.FedPGD.calfat.trainer",
    ),
    "seeds are no list": ("[0, 1]", "3", "4: seeds"),
    "no seeds": ("[0, 1]", "[]", "4: seeds"),
    "a bad seed": ("[0, 1]", "[0, -1]", "4: seeds[1]"),
    "a seed twice": ("[0, 1]", "[7, 7]", "4: seeds[1]"),
    "no metrics": (f"metrics: {METRICS}\n", "", " metrics"),
    "a metric twice": (METRICS, "[pgd20, pgd20]", "5: metrics[1]"),
    "two metrics under one heading": (METRICS, "{natural: accuracy, pgd20: accuracy}", "5: metrics.pgd20"),
    "cells times seeds": (AXES, "axes:\n" + "".join(f"  a{i}: {{{TEN}}}\n" for i in range(4)), "6: axes"),
    "unknown key of reported": ("", SOURCE + "  percents: {}\n", "12: reported.percents"),
    "reported for no cell": ("", SOURCE + "  percent: {CalFTA: {natural: 1}}\n", "12: reported.percent.CalFTA"),
    "reported for no metric": (
        "",
        SOURCE + "  percent: {CalFAT: {pgd200: 1}}\n",
        "12: reported.percent.CalFAT.pgd200",
    ),
    "reported out of range": (
        "",
        SOURCE + "  percent: {CalFAT: {natural: 164.69}}\n",
        "12: reported.percent.CalFAT.natural",
    ),
    "reported without source": (
        "",
        "reported:\n  percent: {CalFAT: {natural: 64.69}}\n",
        "11: reported.percent.CalFAT",
    ),
    "skip without reason": ("", "skip: {FedPGD: }\n", "10: skip.FedPGD"),
    "skip with a blank reason": ("", "skip: {FedPGD: ' '}\n", "10: skip.FedPGD"),
    "skip nothing": ("", "skip: {FedMART: slow}\n", "10: skip.FedMART"),
    "runs elsewhere": ("", "runs: ../table1\n", "10: runs"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_suite_is_reported_whole(case, tmp_path, snapshot):
    old, new, place = BAD[case]
    with snapshot.raises(RecipeError, f"tiny.yaml:{place}: "):
        parse(tmp_path, SUITE.replace(old, new, 1) if old else SUITE + new)


@pytest.mark.parametrize(
    ("text", "matching"),
    [
        ("CIFAR-10/CalFAT", [("CIFAR-10", "CalFAT")]),
        ("cifar-10/calfat", [("CIFAR-10", "CalFAT")]),
        ("*/CalFAT", [("CIFAR-10", "CalFAT"), ("SVHN", "CalFAT")]),
        ("SVHN", [("SVHN", "CalFAT"), ("SVHN", "FedPGD")]),
        ("Fed*", [("CIFAR-10", "FedPGD"), ("SVHN", "FedPGD")]),
        ("CIFAR-10/CalFAT/x", []),
        ("CIFAR-1", []),
    ],
)
def test_selectors(text, matching):
    cells = [("CIFAR-10", "CalFAT"), ("CIFAR-10", "FedPGD"), ("SVHN", "CalFAT"), ("SVHN", "FedPGD")]
    assert [cell for cell in cells if matches(text, cell)] == matching


def test_a_selector_of_another_shape_is_reported(tmp_path):
    suite, known = parse(tmp_path, SUITE), "Cells are method, with the labels CalFAT, FedPGD."
    assert suite.problem_of("a/b") == f"'a/b' matches no cell. {known}"
    assert suite.problem_of("zzz") == f"'zzz' matches no cell. {known}"
    assert suite.problem_of("FedPGD") == ""


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("CIFAR-10", "cifar-10"),
        ("FedPGD + LogitAdj", "fedpgd-logitadj"),
        ("0.05", "0.05"),
        ("..", ""),
        ("r = 1 ", "r-1"),
    ],
)
def test_slug(text, folder):
    assert slug(text) == folder


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=6,
)


@given(value=plain)
def test_an_override_says_the_same_as_the_suite_file(value):
    """What `calfat run --set` reads is what the suite's YAML said, whatever it is."""
    setting = Setting("train_args.x", value)
    key, _, text = setting.override.partition("=")
    assert key == "train_args.x"
    assert yaml.safe_load(text) == value


@pytest.mark.parametrize("value", ["8/255", "1e-3", 0.00001, "off", "010", [1, {"a": "b: c"}], {}])
def test_overrides_survive_the_recipe_reader(value):
    setting = Setting("calfat.x", value)
    assert Document("base", {}).with_overrides([setting.override]).get(("calfat", "x")) == value
