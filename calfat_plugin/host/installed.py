"""Which hosts are installed here, what to do where the one that a run needs is not, and FedML's own command line.

No host is imported with this module.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from importlib import metadata

from calfat_plugin.errors import HostError

TESTED_FEDML = "0.9.6"  # the patches in launch.py are for this version
TESTED_FLOWER = "1.42"
_NEWEST_PROTOBUF = 3  # major version that FedML can be imported with
FEDML_INSTALLS = sys.version_info < (3, 12)  # setup.cfg says why not above


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def refuse_without_fedml() -> None:
    if version_of("fedml") is None:
        raise HostError(f"FedML is not installed, and a run needs a host that runs its rounds. {how_to_get_a_host()}")
    protobuf = version_of("protobuf") or ""
    # Its wandb 0.13.2 holds code that protobuf 3 generated. Newer ones run that in pure Python only, if told to.
    in_python = os.environ.get("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION") == "python"
    if protobuf and int(protobuf.split(".")[0]) > _NEWEST_PROTOBUF and not in_python:
        raise HostError(
            f"protobuf {protobuf} is installed, and FedML {TESTED_FEDML} can be imported with protobuf "
            f"{_NEWEST_PROTOBUF} at most. Another package brought it, as `pip install onnx` does. Put it back with: "
            "pip install 'protobuf<4'. For ONNX files, pip install 'calfat-plugin[onnx]' takes versions that fit."
        )


def refuse_without_flower() -> None:
    """Refuse a run of Flower where it, or Ray, is not installed, or not of the tested version."""
    flower = version_of("flwr")
    ray = version_of("ray")
    if flower is None:
        problem = "Flower is not installed"
    elif ray is None:
        problem = f"flwr {flower} is installed without ray"
    elif not flower.startswith(f"{TESTED_FLOWER}."):
        problem = f"flwr {flower} is installed"
    else:
        return
    raise HostError(
        f"{problem}; common_args.host: flower needs flwr {TESTED_FLOWER} and ray, without FedML, whose protobuf is "
        "older: on Python 3.12 or later, pip install 'calfat-plugin[flower]'."
    )


def how_to_get_a_host() -> str:
    """What to do where FedML is not installed: on this version of Python, and beside what is installed."""
    flower = version_of("flwr")
    choose = "add --host flower, or common_args.host: flower to the recipe"
    if FEDML_INSTALLS and flower is None:
        return f"Install it: pip install fedml=={TESTED_FEDML}"
    if FEDML_INSTALLS:
        return f"Install it: pip install fedml=={TESTED_FEDML}; or {choose}: Flower is installed."
    install = "Install Flower (pip install 'calfat-plugin[flower]') and"
    if flower is not None:
        install = f"Flower {flower} is installed:"
    return (
        f"FedML {TESTED_FEDML} installs on Python 3.10 and 3.11 only, and this is Python {platform.python_version()}. "
        f"{install} {choose}; or make an environment with Python 3.11, where pip install calfat-plugin brings FedML."
    )


def run_fedml_command() -> None:
    """Run the host's own ``fedml`` with this process's arguments; it imports no torch."""
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    from fedml.cli.cli import cli

    cli()
