"""Recipe to the flat ``args`` object that the host reads.

Only the host's own sections go there. The ``calfat:`` section never does: the host flattens everything onto one
object, where an attack's ``epsilon`` would land on the ``epsilon`` of its differential privacy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

from calfat_plugin import __version__
from calfat_plugin.experiment import Experiment
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.silo import SILO, Address, Silo

#: Backends of cross-silo runs, with the module and the package that each needs.
_BACKENDS = {"GRPC": ("grpc", "grpcio"), "MPI": ("mpi4py", "mpi4py"), "MQTT_S3": ("paho.mqtt", "paho-mqtt")}


def host_arguments(experiment: Experiment, *, run_id: str) -> SimpleNamespace:
    """The host's view of a recipe. Its own sections only: ``calfat`` keys would collide with the host's."""
    recipe = experiment.recipe
    args = SimpleNamespace(
        yaml_config_file=recipe.document.file,
        run_id=run_id,
        rank=0,
        local_rank=0,
        role="server",
        using_mlops=False,
    )
    for extra in recipe.host_extra.values():
        vars(args).update(extra)
    for section in (
        recipe.common,
        recipe.data,
        recipe.model,
        recipe.train,
        recipe.device,
        recipe.comm,
        recipe.tracking,
    ):
        vars(args).update(dataclasses.asdict(section))
    args.data_cache_dir = str(Path(recipe.data.data_cache_dir).expanduser())
    args.client_num_per_round = recipe.clients_per_round
    args.worker_num = recipe.clients_per_round
    # The host asks us after every round; calfat.monitor decides what is evaluated.
    args.frequency_of_the_test = 1
    return args


def silo_arguments(experiment: Experiment, *, rank: int) -> SimpleNamespace:
    """The host's view of a recipe for one party of a cross-silo run.

    Raises:
        HostError: when the recipe asks for something that this runtime cannot do.
    """
    args = host_arguments(experiment, run_id="0")
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
    for key in ("silo", "runtime", "evaluators", "monitor", "evaluation", "loggers", "reported"):
        plain["calfat"].pop(key, None)
    text = json.dumps([__version__, plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_unsupported(experiment: Experiment) -> None:
    """Refuse what the host, or this version of the plugin, cannot do.

    Raises:
        RecipeError: with place, key path and what to write instead.
    """
    document, recipe = experiment.recipe.document, experiment.recipe
    backend = recipe.comm.backend
    own_data = experiment.partition.entry.name == SILO
    if own_data and not experiment.dataset.entry.per_party:
        raise document.error(
            ("data_args", "partition_method"),
            f"silo needs a data set that each party can read its own part of; '{experiment.dataset.name}' is one for "
            "all. Take image_folder, or a data set of your own with per_party.",
        )
    if recipe.common.training_type == "cross_silo":
        _refuse_in_cross_silo(experiment)
    elif own_data:
        raise document.error(
            ("data_args", "partition_method"),
            "silo leaves the data with the parties, so it needs common_args.training_type: cross_silo.",
        )
    elif backend not in ("sp", "MPI"):
        raise document.error(
            ("comm_args", "backend"),
            f"'{backend}' carries cross-silo runs only: the host simulates in one process (sp) or in an MPI job (MPI). "
            "Write one of these, or common_args.training_type: cross_silo for one process a party.",
        )
    elif backend == "MPI":
        _refuse_missing_package(document, backend)


def _refuse_missing_package(document: Document, backend: str) -> None:
    module, package = _BACKENDS[backend]
    if _is_missing(module):
        raise document.error(
            ("comm_args", "backend"),
            f"{backend} needs the package {package}: pip install 'calfat-plugin[{backend.lower().replace('_', '-')}]'.",
        )


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of a dotted name, the first part
        return True


def _refuse_in_cross_silo(experiment: Experiment) -> None:
    document, recipe = experiment.recipe.document, experiment.recipe
    backend = recipe.comm.backend
    if backend not in _BACKENDS:
        raise document.error(
            ("comm_args", "backend"), f"'{backend}' cannot carry a cross-silo run; write {', '.join(_BACKENDS)}."
        )
    _refuse_missing_package(document, backend)
    for section, values in recipe.host_extra.items():
        scenario = values.get("scenario", "horizontal")
        if scenario != "horizontal":
            raise document.error(
                (section, "scenario"),
                f"'{scenario}' cannot be run: the host ends the process as soon as it is asked for hierarchical silos "
                "(fedml 0.9.6, __init__.py:389). Leave the key out, or write horizontal.",
            )
    if recipe.train.federated_optimizer != "FedAvg":
        raise document.error(
            ("train_args", "federated_optimizer"),
            f"'{recipe.train.federated_optimizer}' cannot be run: the host's cross-silo runtime knows FedAvg only. "
            "Write FedAvg and name the algorithm in calfat.aggregator.",
        )
    if not recipe.silo.settings.insecure:
        _refuse_open_ends(document, recipe.silo, backend)


def _refuse_open_ends(document: Document, silo: Silo, backend: str) -> None:
    """Refuse addresses that other machines can reach, or be asked for, without TLS."""
    if backend == "MQTT_S3":
        broker = silo.mqtt.address
        if not (broker.is_loopback or silo.tls or silo.mqtt.tls):
            raise document.error(
                ("calfat", "silo"),
                f"messages would cross the network to the broker {broker} in the open. Name certificates in "
                "calfat.silo.tls (`calfat certs DIR --broker HOST` makes a test set), or write calfat.silo.mqtt.tls: "
                "true for a broker with a certificate of its own, or calfat.silo.insecure: true for a network in which "
                "everyone may read and join.",
            )
        if not silo.s3.is_safe:
            raise document.error(
                ("calfat", "silo", "s3", "endpoint"),
                f"models would cross the network to {silo.s3.endpoint} in the open. Give the store a certificate and "
                "write https://, or write calfat.silo.insecure: true for a network in which everyone may read along.",
            )
        return
    open_to_all = [str(address) for address in silo.parties if not address.is_loopback]
    if silo.settings.bind is not None and not Address(silo.settings.bind, 1).is_loopback:
        open_to_all.append(silo.settings.bind)
    if open_to_all and silo.tls is None:
        raise document.error(
            ("calfat", "silo"),
            f"{open_to_all[0]} can be reached from other machines, and there are no certificates. Name them in "
            "calfat.silo.tls (`calfat certs DIR` makes a test set), or write calfat.silo.insecure: true for a network "
            "in which everyone may read and join.",
        )
