"""What the parties of a run must have alike, and how large a message of theirs may be."""

from __future__ import annotations

import pytest

from calfat_plugin.host.tasks import fingerprint, max_message
from tests.report.made import experiment

SILOS = ("common_args.training_type=cross_silo", "comm_args.backend=GRPC")


@pytest.mark.parametrize(
    ("edit", "agrees"),
    [
        *((f"train_args.{edit}", False) for edit in ("learning_rate=0.5", "comm_round=9")),
        *((f"calfat.{edit}", False) for edit in ("threat.eps=0.3", "aggregator=scaffold", "runtime.precision=bf16")),
        ("device_args.using_gpu=true", True),
        ("data_args.data_cache_dir=elsewhere", True),
        *((f"calfat.{edit}", True) for edit in ("runtime.threads=3", "silo.round_deadline=5", "loggers=[tensorboard]")),
        *((f"calfat.{edit}", True) for edit in ("evaluators=[fgsm]", "monitor.every=7", "evaluation.batch_size=3")),
    ],
)
def test_parties_agree_on_what_is_trained_and_on_nothing_else(edit: str, agrees: bool) -> None:
    assert (fingerprint(experiment(*SILOS, edit)) == fingerprint(experiment(*SILOS))) == agrees


def test_a_message_is_no_longer_than_the_recipe_says_or_else_eight_models_and_a_megabyte() -> None:
    assert max_message(experiment(*SILOS), 500) == 8 * 500 + 1_000_000
    assert max_message(experiment(*SILOS, "calfat.silo.max_message_mb=3"), 500) == 3_000_000
