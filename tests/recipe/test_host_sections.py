"""What is said of keys of FedML on which nobody acts here, and of those that promise what there is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import assemble
from calfat_plugin.options import describe_options
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.schema import HOST_SECTIONS
from calfat_plugin.report import write_run_report
from calfat_plugin.testing import builtin_registry
from tests.cli.runner import Ended, calfat
from tests.recipe.tables import GOOD, SAID_OF_GOOD, edited
from tests.recipes import assembled
from tests.report.made import made_run

pytestmark = pytest.mark.usefixtures("in_a_folder")
BESIDE = "comm_args: {backend: sp} -> comm_args: {backend: sp}"
ACCEPTED = {
    "comm_round: 40 -> comm_round: 40\\n  BatchSize: 64": [
        "8: train_args.BatchSize: this key has no effect here. Did you mean 'batch_size'?"
    ],
    "epochs: 1 -> epochs: 1\\n  lr: 0.5": [
        "9: train_args.lr: this key has no effect here. Did you mean 'train_args.learning_rate'?"
    ],
    "epochs: 1 -> epochs: 1\\n  zzz: 0": ["9: train_args.zzz: this key has no effect here."],
    f"{BESIDE}\\ntracking_args: {{run_name: mine}}": ["13: tracking_args.run_name: this key has no effect here."],
    f"{BESIDE}\\nvalidation_args: {{frequency_of_the_test: 5}}": [
        "13: validation_args: this section has no effect here."
    ],
    f"{BESIDE}\\ndp_args: {{epsilon: 0.5}}": ["13: dp_args: this section has no effect here."],
    # one warning for all, as in a configuration of FedML
    f"{BESIDE}\\nx_args: {{a: 1}}\\ntracking_args: {{run_name: mine, wandb_key: x}}\\nattack_args: {{a: 1}}": [
        "13: x_args: this section has no effect here. Nor has r.yaml:14: tracking_args.run_name. Nor has r.yaml:14: "
        "tracking_args.wandb_key. Nor has r.yaml:15: attack_args."
    ],
    "epochs: 1 -> epochs: 2\\n  local_steps: 30\\n  client_optimizer: adam\\n  momentum: 0.5\\n  lr_decay_rate: 0.99": [
        "8: train_args.epochs: this key has no effect here: it needs train_args.local_steps: null.",
        "11: train_args.momentum: this key has no effect here: it needs train_args.client_optimizer: sgd.",
        "12: train_args.lr_decay_rate: this key has no effect here: it needs train_args.lr_schedule: step.",
    ],
    "epochs: 1 -> federated_optimizer: FedProx": [
        "8: train_args.federated_optimizer: 'FedProx' has no effect; calfat.aggregator selects the algorithm, here "
        "'fedavg'."
    ],
    # switched off, and a promise of nothing: without a word
    f"{BESIDE}\\ndp_args: {{enable_dp: false, epsilon: 1}}\\ntracking_args: {{enable_wandb: false, run_name: x}}": [],
    "epochs: 1 -> epochs: 1\\n  nesterov: false\\n  lr_scheduler: null\\n  max_grad_norm: null\\n  enable_dp: null": [],
}


@pytest.mark.parametrize("edit", ACCEPTED)
def test_a_key_without_effect_is_named_and_then_left_out(edit: str) -> None:
    Path("r.yaml").write_text(edited(edit))
    said = "".join(f"warning: r.yaml:{warning}\n" for warning in ACCEPTED[edit])
    assert calfat("check", "r.yaml") == Ended(0, SAID_OF_GOOD, said)
    assert calfat("check", "r.yaml", "--strict").code == (2 if said else 0)
    written = yaml.safe_load(calfat("check", "r.yaml", "--show").out)
    assert {*written} == {*HOST_SECTIONS, "calfat"}
    for section, config in HOST_SECTIONS.items():
        assert {*written[section]} <= {info.name for info in describe_options(config)}


def test_a_suite_is_as_strict() -> None:
    Path("base.yaml").write_text(GOOD.replace("  epochs: 1", "  early_stopping: true"))
    Path("s.yaml").write_text(
        "base: base.yaml\nseeds: [0]\nmetrics: [natural]\n"
        "axes: {a: {b: {train_args.dampening: 1, train_args.batch_size: 32}, c: {}}}\n"
    )
    ended = calfat("check", "s.yaml", "--strict")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith("\nerror: s.yaml: 2 warnings; --strict allows none.\n")


def test_nothing_without_effect_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calfat_plugin.report.charts.FORMATS", {})  # figures on the page, none beside it
    page = write_run_report(
        made_run(
            tmp_path / "run",
            "train_args.early_stopping=true",
            "train_args.server_lr=0.81259",
            "train_args.federated_optimizer=FedProx",
            "dp_args.enable_dp=false",
            "dp_args.epsilon=0.06257",
            final={"natural": 0.5},
        )
    )
    for text in (page.read_text(), (tmp_path / "run" / "recipe.yaml").read_text()):
        for word in ("early_stopping", "server_lr", "0.81259", "FedProx", "enable_dp", "0.06257"):
            assert word not in text


WITHOUT_ALPHA = GOOD.replace("partition_method: dirichlet", "partition_method: iid")
METHOD = "data_args.partition_method=iid"
ALPHA = "data_args.partition_alpha: this key has no effect here: the partition 'iid' does not use it.\n"


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        (WITHOUT_ALPHA, [], f"warning: r.yaml:2: {ALPHA}"),
        (WITHOUT_ALPHA.replace(", partition_alpha: 0.1", ""), [], ""),
        (GOOD, [METHOD], ""),  # it replaces what the file chose together
        (GOOD, [METHOD, "data_args.partition_alpha=0.3"], f"warning: --set data_args.partition_alpha=0.3: {ALPHA}"),
        # the preset's concentration is not what the user wrote
        (WITHOUT_ALPHA.replace(", partition_alpha: 0.1", ""), ["calfat.trainer={name: calfat, preset: paper}"], ""),
    ],
    ids=["in the file", "without", "partition overridden", "both overridden", "of a preset"],
)
def test_a_concentration_that_the_partition_does_not_use_is_named(recipe: str, overrides: list[str], said: str) -> None:
    Path("r.yaml").write_text(recipe)
    ended = calfat("check", "r.yaml", *(word for override in overrides for word in ("--set", override)))
    assert (ended.code, ended.err) == (0, said)


SMALL = "model_args: {model: cnn_small}\ntrain_args: {client_num_in_total: 11}\n"


def test_each_is_named_with_its_place() -> None:
    text = SMALL.replace("{client", "{zzz: 1, yyy: 1, client") + "calfat: {clients: [{ids: 0, epochs: 2}]}\n"
    assert assembled(text, "train_args.comm_rounds=3", "validation_args.ci=1").warnings == (
        "r.yaml:2: train_args.zzz: this key has no effect here. Nor has r.yaml:2: train_args.yyy. Nor has "
        "--set train_args.comm_rounds=3: train_args.comm_rounds. Did you mean 'comm_round'? Nor has "
        "--set validation_args.ci=1: validation_args.",
    )
    recipe: dict[str, Any] = {"train_args": {"zzz": 1, "yyy": 1}, "calfat": {}}
    assert assemble(Document("recipe", recipe), builtin_registry()).warnings == (
        "recipe: train_args.zzz: this key has no effect here. Nor has recipe: train_args.yyy.",
    )


def test_a_silo_reads_them_alike() -> None:
    text = "common_args: {training_type: cross_silo, scenario: hierarchical}\ncomm_args: {backend: GRPC}\ncalfat: {}\n"
    assert assembled(text).warnings == ("r.yaml:1: common_args.scenario: this key has no effect here.",)
    for runtime in ("common_args.host=flower", "common_args.training_type=cross_silo"):
        with pytest.raises(RecipeError) as refused:
            assembled(text.replace("comm_args: {backend: GRPC}", "x: {enable_attack: 1}"), runtime)
        assert str(refused.value).startswith("r.yaml:2: x.enable_attack: got 1 (int), but FedML's own attacks do not ")


def test_false_and_null_ask_for_nothing() -> None:
    """Every key of ours that takes one of them has it as its default, so no misspelt one can mean something else."""
    for config in HOST_SECTIONS.values():
        for info in describe_options(config):
            assert info.default in (None, False) or not (info.optional or info.type is bool), info.name
