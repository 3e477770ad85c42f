"""A whole federation in this process: server and clients of an experiment, as a runtime would drive them."""

from __future__ import annotations

import torch

from calfat_plugin.datasets import Dataset
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.worker import Worker
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import RoundRecord
from calfat_plugin.runs.loaded_run import model_loader
from calfat_plugin.testing.tiny import CPU, require, same_bits, tiny_dataset


class TinyFederation:
    """All clients of an experiment, on images that are sorted by label, so that each client misses classes."""

    def __init__(
        self,
        experiment: Experiment,
        snapshot: Snapshot | None = None,
        dataset: Dataset | None = None,
        device: torch.device = CPU,
    ) -> None:
        dataset = tiny_dataset() if dataset is None else dataset
        parts = torch.tensor_split(torch.argsort(dataset.train.y, stable=True), experiment.num_clients)
        shards = {client: dataset.train.subset(part.tolist()).to(device) for client, part in enumerate(parts)}
        loading = model_loader(experiment.dataset.name, dataset, device)
        self.server = Server(experiment, dataset, device, RunObserver(), lambda: self.worker, loading)
        self.worker = Worker(experiment, dataset, shards, device, RunObserver())
        if snapshot is not None:
            self.server.begin(snapshot)
            self.worker.client_states.update(snapshot.client_states)

    def play(self) -> RoundRecord:
        """One round."""
        number = self.server.round + 1
        clients = self.server.start_round(number)
        downlink = self.server.downlink()
        uploads = {c: (self.worker.num_examples(c), self.worker.fit(c, number, downlink)) for c in clients}
        return self.server.finish_round(number, uploads)

    def snapshot(self) -> Snapshot:
        """What a checkpoint has."""
        return self.server.snapshot(dict(self.worker.client_states))


def check_federation(experiment: Experiment, device: torch.device = CPU) -> None:
    """Two rounds go through, no update is refused, and a run that is resumed between them ends with the same bits."""
    whole = TinyFederation(experiment, device=device)
    records = [whole.play()]
    resumed = TinyFederation(experiment, whole.snapshot(), device=device)
    records.append(whole.play())
    refused = {client: reason for record in records for client, reason in record.refused.items()}
    require(not refused, f"every update must be of use, but the server refused some: {refused}.")
    resumed.play()
    for what in ("state", "average", "server_state", "broadcast"):
        same = same_bits(getattr(whole.server, what), getattr(resumed.server, what))
        require(same, f"a run that is resumed after round 1 must end with the same {what}; keep no state in objects.")
    kept, again = whole.worker.client_states, resumed.worker.client_states
    same = kept.keys() == again.keys() and all(same_bits(kept[client], again[client]) for client in kept)
    require(same, "a run that is resumed after round 1 must end with the same client states; keep no state in objects.")
