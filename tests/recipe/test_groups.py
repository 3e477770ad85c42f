"""``calfat.clients``: who is in which group, what its clients train by, and the errors of wrong groups."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import yaml

from calfat_plugin.entries import TrainerEntry
from calfat_plugin.errors import CalfatError, OptionError, RecipeError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.clients import GROUPED, parsed_ids
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.testing import builtin_registry
from tests.plugins import offering
from tests.recipe.tables import Row, rows
from tests.recipes import assembled
from tests.snapshot import TextSnapshot

RECIPE = """\
common_args: {{random_seed: 0}}
model_args: {{model: cnn_small}}
data_args: {{partition_method: {partition}}}
train_args: {{client_num_in_total: 10, comm_round: 2, epochs: 2, batch_size: 32, learning_rate: 0.1}}
calfat:
  trainer: {{name: fedpgd, loss: logitadj}}
  threat: {{eps: 0.1, step_size: eps/2, steps: 3}}
  clients:
{groups}
"""


def resolved(*groups: str, partition: str = "iid", **sections: Any) -> Experiment:
    text = RECIPE.format(groups="\n".join(f"    - {group}" for group in groups), partition=partition)
    document = parse_document(text, "r.yaml")
    for path, value in sections.items():
        document = document.with_value(tuple(path.split("__")), value, f"--set {path}")
    return assemble(document, builtin_registry())


def members(experiment: Experiment, labels: Any = None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for client, group in experiment.client_groups(np.zeros(100, dtype=np.int64) if labels is None else labels).items():
        found.setdefault(group.name, []).append(client)
    return found


# --- who is in a group ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "ids"),
    [("3", (3,)), ("2-4", (2, 3, 4)), ("[0, 1]", (0, 1)), ("[7, 0, 2-4]", (0, 2, 3, 4, 7)), ("'5 - 6'", (5, 6))],
)
def test_ids_are_numbers_and_ranges(written: str, ids: tuple[int, ...]) -> None:
    assert parsed_ids(yaml.safe_load(written), 10) == ids


@pytest.mark.parametrize("written", ["0-999999999999999", "9" * 5000], ids=["a range", "digits"])
def test_ids_of_any_length_are_refused_at_once(written: str) -> None:
    with pytest.raises(OptionError):
        parsed_ids(written, 10)
    assert len(parsed_ids("0-199999", 200_000)) == 200_000  # and not in the square of their number: minutes


def test_the_first_group_that_chooses_a_client_has_it() -> None:
    experiment = resolved(
        "{ids: [0, 1], attacker: {name: sign_flip, scale: 5}}",
        "{share: 0.3, seed: 7, threat: {eps: 4/255}, name: small}",
        "{ids: 2-4, trainer: standard}",
    )
    found = members(experiment)
    assert found["group1"] == [0, 1]
    assert len(found["small"]) == 3
    assert not {0, 1}.intersection(found["small"])
    assert found["group3"] == [client for client in (2, 3, 4) if client not in found["small"]]
    assert members(experiment) == found


def test_a_share_is_drawn_anew_with_another_seed() -> None:
    drawn = [members(resolved(f"{{share: 0.5, seed: {seed}, epochs: 1}}"))["group1"] for seed in range(4)]
    assert len({tuple(each) for each in drawn}) == 4
    assert all(len(each) == 5 for each in drawn)
    by_run = [members(resolved("{share: 0.5, epochs: 1}", common_args__random_seed=s))["group1"] for s in (0, 1)]
    assert by_run[0] == drawn[0]  # the run's seed is what null stands for
    assert by_run[0] != by_run[1]


def test_two_shares_have_draws_of_their_own() -> None:
    found = members(resolved("{share: 0.5, epochs: 1}", "{share: 0.5, epochs: 3}"))
    assert sorted(found["group1"] + found["group2"]) == list(range(10))
    first, second = (members(resolved("{share: 0.1, epochs: 1}", f"{{share: {s}, epochs: 3}}")) for s in (0.2, 0.3))
    assert first["group1"] == second["group1"]
    assert set(first["group2"]) < set(second["group2"])


def test_the_smallest_and_the_largest_are_by_examples() -> None:
    labels = np.arange(600) % 10
    experiment = resolved("{smallest: 2, epochs: 1}", "{largest: 3, epochs: 3}", partition="dirichlet")
    sizes = [len(part) for part in experiment.split(labels)]
    order = sorted(range(10), key=lambda client: sizes[client])
    assert len(set(sizes)) > 5
    found = members(experiment, labels)
    assert set(found["group1"]) == set(order[:2])
    assert sum(sizes[c] for c in found["group2"]) == sum(sorted(sizes)[-3:])


# --- what its clients train by ----------------------------------------------------------------------------------------


def test_a_group_has_the_runs_recipe_with_its_own_keys() -> None:
    experiment = resolved(
        "{ids: 0, trainer: standard}",
        "{ids: 1, threat: {eps: 4/255}}",
        "{ids: 2, epochs: 5, batch_size: 8, learning_rate: 0.5}",
        "{ids: 3, trainer: {name: fedpgd, loss: fedlc}}",
        "{ids: 4, local_steps: 7}",
    )
    by = {client: experiment.trained_by(group) for client, group in members_by_client(experiment).items()}
    assert by[0].trainer.name == "standard"
    assert by[0].threat == experiment.threat
    assert by[1].trainer.name == "fedpgd"
    assert by[1].modifier.name == "logitadj"
    assert by[1].threat.eps == Fraction(4, 255)
    assert by[1].threat.step_size == Fraction(2, 255)  # eps/2 follows the group's eps
    assert by[1].threat.steps == 3
    settings = by[2].train_settings(1)
    assert (settings.epochs, settings.batch_size, settings.learning_rate) == (5, 8, 0.5)
    assert by[3].modifier.name == "fedlc"
    assert by[4].train_settings(1).local_steps == 7
    assert experiment.trained_by(None) is experiment
    assert experiment.train_settings(1).epochs == 2


def members_by_client(experiment: Experiment) -> Any:
    return experiment.client_groups(np.zeros(100, dtype=np.int64))


def test_the_recipe_as_run_has_the_groups_in_full() -> None:
    experiment = resolved(
        "{ids: [0, 1], attacker: sign_flip, name: liars}",
        "{share: 0.3, seed: 7, threat: {eps: 4/255}}",
        "{smallest: 1, trainer: standard, epochs: 3}",
    )
    written = experiment.as_run()
    assert written["calfat"]["clients"] == [
        {"name": "liars", "ids": [0, 1], "attacker": {"name": "sign_flip", "scale": 1.0}},
        {
            "share": 0.3,
            "seed": 7,
            "name": "group2",
            "threat": {"norm": "linf", "eps": "4/255", "step_size": "eps/2", "steps": 3},
        },
        {"smallest": 1, "epochs": 3, "name": "group3", "trainer": {"name": "standard", "loss": {"name": "plain"}}},
    ]
    again = assembled(yaml.safe_dump(written))
    assert again.as_run() == written
    assert again.warnings == ()


def test_of_a_groups_preset_only_the_options_count() -> None:
    """What it would set elsewhere is the run's, and a recipe as run has no place for it."""
    whole = resolved("{ids: 0, trainer: {name: calfat, preset: release}}", data_args__dataset="cifar10")
    (group,) = whole.clients
    assert group.recipe.trainer.options.prior_weight == 0.1
    assert group.recipe.train.weight_decay == whole.train.weight_decay
    again = assembled(yaml.safe_dump(whole.as_run()))
    assert again.clients[0].recipe.train.weight_decay == group.recipe.train.weight_decay


def test_keys_of_a_group_without_effect_are_warned_of() -> None:
    lasting = resolved("{ids: 0, epochs: 5}", train_args__local_steps=10)
    assert [text.partition(": this key has no effect")[0] for text in lasting.warnings] == [
        "r.yaml:4: train_args.epochs",
        "r.yaml:9: calfat.clients[0]: train_args.epochs",
    ]
    short = resolved("{ids: 0, threat: {eps: 0.3, step_size: 0.01}, name: far}")
    assert [text.partition(": ")[2][:37] for text in short.warnings] == ["calfat.clients[0]: training of far: s"]


@pytest.mark.parametrize(
    ("group", "trainer", "useless"),
    [
        ("{ids: 0, trainer: fedpgd}", "standard", ["threat.steps"]),
        ("{ids: 0, trainer: {name: fedpgd}, threat: {inner: pgd}}", "standard", ["threat.inner"]),
        ("{ids: 0, threat: {inner: pgd}}", "fedpgd", []),
        ("{ids: 0, threat: {inner: rs-fgsm}}", "fedpgd", ["threat.steps"]),
        ("{ids: 0, epochs: 2}", "standard", ["threat.inner"]),
    ],
)
def test_what_a_group_alone_uses_has_an_effect(group: str, trainer: str, useless: list[str]) -> None:
    found = resolved(group, calfat__trainer=trainer, calfat__threat={"inner": "n-fgsm", "steps": 7}).warnings
    assert [text.partition(": this key")[0].rpartition("calfat.")[2] for text in found] == useless


def test_papers_of_groups_and_attackers_are_cited() -> None:
    texts = [
        citation.text for citation in resolved("{ids: 0, attacker: alie}", "{ids: 1, trainer: fedtrades}").citations()
    ]
    assert any("A Little Is Enough" in text for text in texts)
    assert any("TRADES" in text or "Theoretically Principled" in text for text in texts)


def test_metrics_of_a_groups_trainer_are_columns() -> None:
    plugin = offering(TrainerEntry("measuring", build=dict, metrics={"margin": "mean margin"}))
    text = RECIPE.format(
        groups="    - {ids: 0, trainer: measuring}\n    - {ids: 1, trainer: measuring}", partition="iid"
    )
    experiment = assembled(text, plugins=(plugin,))
    groups = [f"group/{name}/{what}" for name in ("group1", "group2", "others") for what in GROUPED]
    assert experiment.metric_columns == ("train/margin", *groups)


# --- wrong groups -----------------------------------------------------------------------------------------------------

WRONG = rows("groups.txt")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_wrong_groups_are_refused(wrong: Row) -> None:
    with pytest.raises(CalfatError) as refused:
        resolved(*wrong.edit.split(" ; "))
    assert str(refused.value).startswith(wrong.expected)


def test_groups_are_a_list() -> None:
    with pytest.raises(RecipeError, match=r"^--set .*: calfat\.clients: got 3 \(int\), expected a list such as \["):
        resolved("{ids: 0, epochs: 1}", calfat__clients=3)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (
            ["{ids: 0-7, epochs: 1}", "{smallest: 3, epochs: 3}"],
            "r.yaml:10: calfat.clients[1]: it asks for 3 clients, and 2 are in no group above.",
        ),
        (
            ["{smallest: 10, attacker: sign_flip}"],
            "r.yaml:8: calfat.clients: every client is an attacker; expected at least one that is not.",
        ),
    ],
)
def test_what_only_the_data_show_to_be_too_many_is_refused_then(groups: list[str], text: str) -> None:
    experiment = resolved(*groups)
    with pytest.raises(RecipeError) as refused:
        experiment.client_groups(np.zeros(100, dtype=np.int64))
    assert str(refused.value) == text


def test_sizes_and_attackers_are_refused_across_silos(snapshot: TextSnapshot) -> None:
    silos = {"common_args__training_type": "cross_silo", "comm_args__backend": "GRPC"}
    with snapshot.raises(RecipeError):
        resolved("{smallest: 2, epochs: 1}", partition="silo", data_args__dataset="image_folder", **silos)
    with snapshot.raises(RecipeError):
        resolved("{ids: 0, attacker: ipm}", **silos)


def test_a_share_may_be_drawn_across_silos() -> None:
    """Each party draws the same one, from the recipe."""
    experiment = resolved("{share: 0.3, epochs: 1}", common_args__training_type="cross_silo", comm_args__backend="GRPC")
    assert members(experiment) == members(resolved("{share: 0.3, epochs: 1}"))


FEDRBN = {"calfat__trainer": "fedrbn"}


ST = {"calfat__trainer": {"name": "fedrbn", "role": "st"}}
TENTH = {"calfat__trainer": {"name": "fedrbn", "at_fraction": 0.1}}
ROBAL = {"calfat__trainer": {"name": "fedpgd", "loss": "robal"}}
SFAT = {"calfat__trainer": "standard", "calfat__aggregator": "sfat"}
ALL_ST = "--set calfat__trainer: calfat.trainer: role: every client has the role st; "


@pytest.mark.parametrize(
    ("group", "settings", "text"),
    [
        ("trainer: fedpgd", FEDRBN, "r.yaml:9: calfat.clients[0].trainer: 'fedrbn' changes the model's tensors, "),
        ("trainer: {name: fedrbn, role: st}", ST, ALL_ST),
        ("ids: 0-9, trainer: {name: fedrbn, role: st}", FEDRBN, ALL_ST),
        ("ids: 9, trainer: {name: fedrbn, role: st}", TENTH, ALL_ST),
        ("trainer: {name: fedrbn, roles: at st}", FEDRBN, "r.yaml:9: calfat.clients[0]: roles: got 2 roles in 'at st'"),
        (
            "trainer: {name: fedrbn, role: st, roles: at st}",
            FEDRBN,
            "r.yaml:9: calfat.clients[0]: calfat.trainer: role and roles: both say who",
        ),
        (
            "trainer: {name: fedpgd, loss: {name: robal, preset: cifar100-r}}",
            ROBAL,
            "--set calfat__trainer: calfat.trainer.loss: gamma: got 0.03125 beside 0.0625 for other clients; ",
        ),
        (
            "trainer: {name: fedrbn, at_fraction: 0.01}",
            FEDRBN,
            "r.yaml:9: calfat.clients[0]: at_fraction: got 0.01, which leaves none of the 10 clients ",
        ),
        ("threat: {steps: 1}", {"calfat__trainer": "fedgairat"}, "r.yaml:9: calfat.clients[0]: weighting tanh divides"),
        ("epochs: 1", SFAT, "--set calfat__aggregator: calfat.aggregator: aggregator 'sfat' and local trainer 'stand"),
    ],
)
def test_methods_that_cannot_be_together_are_refused(group: str, settings: Any, text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        resolved(f"{{{'' if 'ids' in group else 'ids: 0, '}{group}}}", **settings)
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    ("group", "settings"),
    [
        ("{ids: 0, trainer: standard}", {"calfat__aggregator": "sfat"}),
        ("{ids: 0, trainer: fedpgd}", SFAT),
        ("{ids: 0, trainer: {name: fedrbn, role: st}}", FEDRBN),
        ("{ids: 0-8, trainer: {name: fedrbn, role: st}}", FEDRBN),
        ("{ids: 0, trainer: {name: fedpgd, loss: {name: robal, preset: cifar10-n}}}", ROBAL),
        ("{share: 0.3, trainer: fedrbn}", ST),
    ],
)
def test_methods_that_can_be_together_are_not_refused(group: str, settings: Any) -> None:
    assert [group.name for group in resolved(group, **settings).clients] == ["group1"]
