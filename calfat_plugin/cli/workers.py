"""``calfat run RECIPE --workers N``: what it asks for, and when it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from calfat_plugin.cli.errors import warn
from calfat_plugin.compat import num_cores
from calfat_plugin.host.runtimes import Runtime
from calfat_plugin.report.numbers import counted
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.workers import AUTO, OPTION, check_workers, number_of_workers


def with_workers(
    request: Request, runtime: Runtime, text: str, *, option: str = OPTION, warn: Callable[[str], None] = warn
) -> Request:
    """The request with its number of workers; ``warn`` shows what the user should know about it."""
    check_workers(runtime, option)
    experiment = request.experiment
    number = number_of_workers(text, experiment, option)
    workers, cores = counted(number, "worker"), num_cores()
    threads = experiment.runtime.threads or cores
    each = counted(threads, "thread")
    if text != AUTO and int(text) > number:
        warn(f"{option} {text}: a round has {counted(number, 'client')}; starting {workers}.")
    if experiment.device.using_gpu:
        pass
    elif number > 1 and number * threads > cores:
        faster = "A smaller calfat.runtime.threads is faster for a new run (it changes the last bits of the result)."
        remedy = faster if threads > 1 else "Fewer workers are as fast."
        warn(f"{option} {text}: {workers} of {each} share {counted(cores, 'core')}. {remedy}")
    elif text == AUTO and number < min(cores, experiment.clients_per_round):
        warn(
            f"{option} {text}: {workers} of {each} on {counted(cores, 'core')}. With a smaller "
            "calfat.runtime.threads, a new run gets more workers (it changes the last bits of the result)."
        )
    return dataclasses.replace(request, workers=number)
