"""What a worker hands to the method, informs of, and answers when training fails."""

from __future__ import annotations

import re

import pytest

from calfat_plugin.errors import UpdateError
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import State
from calfat_plugin.observer import BatchProgress, RunObserver
from calfat_plugin.trainers.calfat import CalFAT
from tests.methods.helpers import CPU, Federation, experiment, small_digits


class Progress(RunObserver):
    """Notes every mini-batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def client_progress(self, progress: BatchProgress) -> None:
        self.seen.append((progress.client, progress.batch, progress.num_batches))


def test_every_mini_batch_is_reported() -> None:
    progress, dataset = Progress(), small_digits()
    worker = Worker(experiment("fedpgd", train_args__batch_size=32), dataset, {4: dataset.train}, CPU, progress)
    worker.fit(4, 1, Federation(experiment("fedpgd")).server.downlink())
    assert progress.seen == [(4, 1, 3), (4, 2, 3), (4, 3, 3)]


def test_what_clients_keep_goes_into_the_mapping_that_the_worker_was_given() -> None:
    states: dict[int, State] = {}
    dataset, scaffold = small_digits(), experiment("fedpgd", "scaffold")
    worker = Worker(scaffold, dataset, {4: dataset.train}, CPU, RunObserver(), states)
    worker.fit(4, 1, Federation(scaffold).server.downlink())
    assert list(states) == [4]
    assert states[4]


def test_batch_normalisation_with_one_example_a_batch_is_no_update() -> None:
    """PyTorch's own error would be a traceback; on digits the last maps of VGG-8 are of one pixel."""
    federation = Federation(experiment("fedpgd", model_args__model="vgg8", train_args__batch_size=1))
    message = federation.worker.fit(0, 3, federation.server.downlink())
    with pytest.raises(UpdateError) as raised:
        federation.server.finish_round(1, {0: (9, message)})
    examples = federation.worker.num_examples(0)
    assert str(raised.value).splitlines()[1:] == [
        "  client 0, round 3: batch normalisation cannot train on one example a batch: train_args.batch_size is 1, "
        f"the client has {examples} examples. Raise what is 1 (data_args decides on the examples), or take a model "
        "without batch normalisation."
    ]


def test_another_value_error_of_a_method_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ValueError("our bug")

    monkeypatch.setattr(CalFAT, "fit", failing)
    with pytest.raises(ValueError, match=re.escape("our bug")):
        Federation(experiment("calfat")).play()
