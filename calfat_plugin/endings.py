"""How a process ended, in words: the name of the signal that killed it, and what the cause may be."""

from __future__ import annotations

import signal

#: Signals by which a process dies of its own fault; others are sent to it.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)


def ending(code: int) -> str:
    """What to call an exit code as Python's processes have it: ``SIGSEGV`` for -11, ``exit code 3`` for 3."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def likely_cause(code: int) -> str:
    """What the cause of an exit code may be, in a sentence; empty where the code does not tell."""
    if -code == signal.SIGKILL:
        return "Whoever sends SIGKILL is most likely the system, because memory has run out."
    if -code in CRASHES:
        return (
            f"{ending(code)} is no want of memory: native code of torch or of a plugin has crashed. Try --set "
            "calfat.runtime.layout=contiguous, or another version of torch."
        )
    return ""
