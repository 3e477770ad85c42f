"""YAML to plain values with their places, and overrides on top."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.errors import CalfatError, RecipeError
from calfat_plugin.exact import StepSize
from calfat_plugin.experiment import assemble
from calfat_plugin.recipe.document import Document, from_python, parse_document
from calfat_plugin.recipe.schema import HOST_SECTIONS
from calfat_plugin.registry import Registry

T = TypeVar("T")

TEXT = """\
train_args:
  epochs: 2
calfat:
  trainer: {name: fedpgd,
            loss: calibrated}
  evaluators:
    - natural
    - name: pgd
      steps: 5
"""


def parsed() -> Document:
    return parse_document(TEXT, "a.yaml")


def test_values_are_plain() -> None:
    assert parsed().data == {
        "train_args": {"epochs": 2},
        "calfat": {
            "trainer": {"name": "fedpgd", "loss": "calibrated"},
            "evaluators": ["natural", {"name": "pgd", "steps": 5}],
        },
    }


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ((), "a.yaml"),
        (("train_args",), "a.yaml:1"),
        (("train_args", "epochs"), "a.yaml:2"),
        (("calfat", "trainer", "name"), "a.yaml:4"),
        (("calfat", "trainer", "loss"), "a.yaml:5"),
        (("calfat", "evaluators", 1), "a.yaml:8"),
        (("calfat", "evaluators", 1, "steps"), "a.yaml:9"),
        (("calfat", "trainer", "delta"), "a.yaml:4"),  # says nothing: the nearest parent that does
        (("comm_args", "backend"), "a.yaml"),
    ],
)
def test_every_path_has_a_place(path: tuple[str | int, ...], place: str) -> None:
    assert parsed().place(path) == place


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("8/255", "8/255"),  # YAML 1.1 reads these three as texts; the options' parser makes numbers of them
        ("1e-3", "1e-3"),
        ("1:2:x", "1:2:x"),
        ("1.0e-3", 0.001),
        ("0x10", 16),
        ("1_000", 1000),
        ("0", 0),
        ("0.5", 0.5),
        ("off", False),
        ("'off'", "off"),
        ("~", None),
        ("'010'", "010"),
    ],
)
def test_scalars(written: str, value: Any) -> None:
    assert parse_document(f"a: {written}", "a.yaml").data == {"a": value}
    override = parsed().with_overrides([f"calfat.x={written}"])
    assert override.get(("calfat", "x")) == value


def test_a_base_is_merged_beneath_what_stands_there() -> None:
    document = parse_document(
        "one: &one {a: 1, b: 1}\ntwo: &two {b: 2, c: 2}\nboth:\n  <<: [*one, *two]\n  a: 3\n", "a.yaml"
    )
    assert document.data["both"] == {"a": 3, "b": 1, "c": 2}
    assert document.place(("both", "a")) == "a.yaml:5"
    assert document.place(("both", "c")) == "a.yaml:2"


def test_overrides_apply_in_order_take_the_place_over_and_leave_the_original_alone() -> None:
    document = parsed()
    changed = document.with_overrides(
        ["train_args.epochs=3", "calfat.trainer={name: calfat}", "calfat.trainer.delta=1/10", "comm_args.backend="]
    )
    assert changed.data["train_args"] == {"epochs": 3}
    assert changed.data["calfat"]["trainer"] == {"name": "calfat", "delta": "1/10"}
    assert changed.data["comm_args"] == {"backend": None}  # nothing after the equals sign
    assert changed.place(("train_args", "epochs")) == "--set train_args.epochs=3"
    assert changed.place(("calfat", "trainer", "name")) == "--set calfat.trainer={name: calfat}"
    assert changed.place(("calfat", "trainer", "delta")) == "--set calfat.trainer.delta=1/10"
    assert (document.data, document.place(("train_args", "epochs"))) == (parsed().data, "a.yaml:2")


def test_a_section_that_an_override_makes_is_at_the_override() -> None:
    changed = parsed().with_overrides(["calfat.monitor.every=3", "calfat.silo.tls.ca=x"])
    assert changed.place(("calfat", "monitor")) == "--set calfat.monitor.every=3"
    assert changed.place(("calfat", "silo", "tls", "cert")) == "--set calfat.silo.tls.ca=x"
    assert changed.place(("calfat",)) == "a.yaml:3"
    of_null = parse_document("train_args:\ncalfat:\n", "a.yaml").with_overrides(["train_args.epochs=3"])
    assert of_null.data == {"train_args": {"epochs": 3}, "calfat": None}


def test_values_of_python_are_those_of_a_file() -> None:
    values = {"a": (np.float64(0.5), True, Fraction(8, 255)), "b": {"c": None, "d": StepSize("eps/4")}}
    values |= {"e": [np.arange(3)[2], np.float32(0.5), np.bool_(True), np.str_("x"), torch.tensor(7)]}
    found = from_python(values)
    assert found == {"a": [0.5, True, "8/255"], "b": {"c": None, "d": "eps/4"}, "e": [2, 0.5, True, "x", 7]}
    assert yaml.safe_load(yaml.safe_dump(found)) == found
    endless: dict[str, Any] = {}
    endless["a"] = endless
    for wrong, said in ({"a": [1, {2}]}, "recipe: a[1]: got {2} (set), "), ({1: 2}, "recipe: the key 1 (int) "):
        with pytest.raises(RecipeError) as refused:
            from_python(wrong)
        assert str(refused.value).startswith(said)
    with pytest.raises(RecipeError, match=r"^recipe: a: values are nested more than 20 deep\.$"):
        from_python(endless)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.sampled_from(["8/255", "1e-3", "1e999", "calfat", "natural", "pgd20", "off", "linf", "release"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["name", "preset", "loss", "label", "steps", "eps", "natural", "x"]), inner),
    ),
    max_leaves=6,
)
KEYS = [
    *((section, key) for section, config in HOST_SECTIONS.items() for key in config.__dataclass_fields__),
    *(("calfat", key) for key in ("trainer", "aggregator", "threat", "evaluators", "monitor", "partition", "dataset")),
    *(("calfat", key) for key in ("model", "evaluation", "runtime", "loggers", "reported", "x")),
    *(("calfat", "trainer", key) for key in ("name", "preset", "loss", "label", "delta", "prior")),
    *(("calfat", "threat", key) for key in ("norm", "eps", "step_size", "steps")),
    *(("calfat", "monitor", key) for key in ("every", "evaluators", "max_examples")),
    ("calfat",),
    ("train_args",),
    ("x",),
]
REGISTRY = Registry.load(entry_points=False)


def attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """(result, "") or (None, what the user is told); any other exception is a bug and gets out."""
    try:
        return action(), ""
    except CalfatError as error:
        return None, str(error)


@given(path=st.sampled_from(KEYS), value=VALUES)
def test_whatever_stands_anywhere_is_accepted_or_refused_in_words(path: tuple[str, ...], value: Any) -> None:
    """What is accepted can be written out, read back and is the same."""
    tree: Any = value
    for step in reversed(path):
        tree = {step: tree}
    tree.setdefault("calfat", {})
    experiment, complaint = attempt(lambda: assemble(parse_document(yaml.safe_dump(tree), "a.yaml"), REGISTRY))
    if experiment is None:
        assert complaint.startswith("a.yaml")
        return
    as_run = experiment.as_run()
    again = assemble(parse_document(yaml.safe_dump(as_run), "b.yaml"), REGISTRY)
    assert again.as_run() == as_run
    assert not any("no effect" in warning for warning in again.warnings)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("data_args: {partition_method: iid, partition_alpha: 0.5}\ncalfat: {}\n", "data_args.partition_alpha"),
        ("train_args: {epochs: 3, local_steps: 5}\ncalfat: {}\n", "train_args.epochs"),
        ("train_args: {client_optimizer: adam, momentum: 0.5}\ncalfat: {}\n", "train_args.momentum"),
        ("train_args: {federated_optimizer: FedProx}\ncalfat: {}\n", "train_args.federated_optimizer"),
    ],
)
def test_the_recipe_of_a_run_draws_no_warning(text: str, key: str) -> None:
    experiment = assemble(parse_document(text, "a.yaml"), REGISTRY)
    assert [warning.split(": ")[1] for warning in experiment.warnings] == [key]
    again = assemble(parse_document(yaml.safe_dump(experiment.as_run()), "recipe.yaml"), REGISTRY)
    assert again.warnings == ()
    assert again.as_run() == experiment.as_run()
    assert "partition_alpha" not in experiment.as_run()["data_args"] or "iid" not in text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("common_args: {training_type: cross_silo}\ncalfat: {}\n", True),
        ("calfat: {silo: {round_deadline: 5}}\n", True),  # for a run across silos of the same recipe
        ("calfat: {}\n", False),
    ],
)
def test_settings_of_silos_are_written_where_they_matter(text: str, written: bool) -> None:
    assert ("silo" in assemble(parse_document(text, "a.yaml"), REGISTRY).as_run()["calfat"]) is written


PIECES = ["&a ", "*a", "<<: ", "{", "}", "[", "]", ": ", ", ", "a", "b", "\n", "  ", "- ", "!!", "?"]


@given(st.text(max_size=40) | st.lists(st.sampled_from(PIECES)).map("".join))
@settings(max_examples=200)
def test_any_text_is_parsed_or_refused_in_words(text: str) -> None:
    document, complaint = attempt(lambda: parse_document(text, "a.yaml"))
    assert document is not None or complaint.startswith("a.yaml")
