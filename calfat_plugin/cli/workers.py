"""``calfat run RECIPE --workers N``: what it asks for, and when it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from calfat_plugin.cli.errors import warn
from calfat_plugin.compat import num_cores
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.runtimes import Runtime
from calfat_plugin.report.numbers import counted
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.workers import AUTO, OPTION, check_workers, number_of_workers


def with_workers(
    request: Request,
    runtime: Runtime,
    text: str,
    *,
    alone: bool = True,
    option: str = OPTION,
    warn: Callable[[str], None] = warn,
) -> Request:
    """The request with its number of workers.

    Args:
        alone: whether this process was not asked to be one of several.
        option: what it is called, for messages.
        warn: shows what the user should know about this number.
    """
    if not (alone or runtime.is_cross_silo):
        raise RunError(f"{option} starts all processes of a run. Leave out --local, --role and --rank.")
    check_workers(runtime, option)
    number = number_of_workers(text, request.experiment, option)
    for note in _notes(text, number, request.experiment):
        warn(f"{option} {text}: {note}")
    return dataclasses.replace(request, workers=number)


def _notes(text: str, number: int, experiment: Experiment) -> Iterator[str]:
    workers = counted(number, "worker")
    if text != AUTO and int(text) > number:
        yield f"a round has {counted(number, 'client')}; starting {workers}."
    if experiment.device.using_gpu:
        return
    cores = num_cores()
    threads = experiment.runtime.threads or cores
    if number > 1 and number * threads > cores:
        faster = "A smaller calfat.runtime.threads is faster for a new run (it changes the last bits of the result)."
        remedy = faster if threads > 1 else "Fewer workers are as fast."
        yield f"{workers} of {counted(threads, 'thread')} share {counted(cores, 'core')}. {remedy}"
    elif text == AUTO and number < min(cores, experiment.clients_per_round):
        yield (
            f"{workers} of {counted(threads, 'thread')} on {counted(cores, 'core')}. With a smaller "
            "calfat.runtime.threads, a new run gets more workers (it changes the last bits of the result)."
        )
