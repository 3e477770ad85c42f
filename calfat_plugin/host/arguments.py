"""Recipe to the flat ``args`` object that the host reads.

Only the host's own sections go there. The ``calfat:`` section never does: the host flattens everything onto one
object, where an attack's ``epsilon`` would land on the ``epsilon`` of its differential privacy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

from calfat_plugin import __version__
from calfat_plugin.experiment import Experiment


def host_arguments(experiment: Experiment) -> SimpleNamespace:
    """The host's view of a recipe. Its own sections only: ``calfat`` keys would collide with the host's."""
    args = SimpleNamespace(
        yaml_config_file=experiment.document.file,
        run_id="0",
        rank=0,
        local_rank=0,
        process_id=0,
        role="server",
        using_mlops=False,
    )
    for extra in experiment.host_extra.values():
        vars(args).update(extra)
    for section in experiment.host_sections.values():
        vars(args).update(dataclasses.asdict(section))
    args.data_cache_dir = str(Path(experiment.data.data_cache_dir).expanduser())
    args.client_num_per_round = experiment.clients_per_round
    args.worker_num = experiment.clients_per_round
    # The host asks us after every round; calfat.monitor decides what is evaluated.
    args.frequency_of_the_test = 1
    return args


def silo_arguments(experiment: Experiment, *, rank: int) -> SimpleNamespace:
    """The host's view of a recipe for one party of a cross-silo run."""
    args = host_arguments(experiment)
    num_clients = experiment.num_clients
    args.scenario, args.role, args.rank = "horizontal", "server" if rank == 0 else "client", rank
    args.worker_num = num_clients
    # The host would take the first ``client_num_per_round`` ranks for the whole federation.
    args.client_id_list = str(list(range(1, num_clients + 1)) if rank == 0 else [rank])
    return args


def fingerprint(experiment: Experiment) -> str:
    """A digest of all in a recipe that two parties of one run must agree on."""
    plain = experiment.as_run()
    for section in ("device_args", "comm_args", "tracking_args"):
        plain.pop(section, None)
    plain["data_args"].pop("data_cache_dir", None)
    for key in ("threads", "cuda_graphs"):
        plain["calfat"]["runtime"].pop(key)
    for key in ("silo", "evaluators", "monitor", "evaluation", "loggers", "reported"):
        plain["calfat"].pop(key, None)
    for plugin in plain["calfat"].get("plugins", {}).values():
        plugin.pop("file")  # a copy of the same content lies elsewhere with each party
    text = json.dumps([__version__, plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
