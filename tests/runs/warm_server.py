"""Starts ``calfat`` processes in no time: imports PyTorch and FedML once, then forks one for each order it reads.

Orders and answers are JSON, a line each, on stdin and stdout. A child is a process like any other: it has its own
folder, environment, arguments and output files, runs the command's own entry point, and can be killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from typing import Any, NoReturn


def import_everything() -> None:
    """What a run imports, as a suite's warm process does, and scikit-learn."""
    import sklearn.datasets  # noqa: F401

    import calfat_plugin.cli.suite_run  # noqa: F401


def child(order: dict[str, Any]) -> NoReturn:
    os.setsid()  # a terminal of its own, as it were: whoever stops it stops nobody else
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        mode = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(name, mode), number)
    sys.argv = ["calfat", *order["arguments"]]
    from calfat_plugin.cli.main import main

    code = 1
    try:
        main(prog_name="calfat")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The child's exit code, negative for a signal; None when it is still at work."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def seen() -> list[Any]:
    """Of what makes a fork worse than a fresh process: threads, as Python and as the system count them, and a GPU in
    use; and whether drawing has been imported."""
    import torch

    drawing = "matplotlib.backends.backend_pdf" in sys.modules
    return [threading.active_count(), len(os.listdir("/proc/self/task")), torch.cuda.is_initialized(), drawing]


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        if "arguments" in order:
            pid = os.fork()
            if pid == 0:
                child(order)
            answer: Any = pid
        elif "imported" in order:
            answer = seen()
        else:
            answer = wait(order["wait"], order["seconds"])
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # tearing PyTorch down takes longer than a test


if __name__ == "__main__":
    import_everything()
    serve()
