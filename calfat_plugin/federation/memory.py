"""How much memory a round takes at most, in this process and on its GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MB = 1e6  # bytes
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_FORGET_PEAK = "5"  # proc(5): the highest resident size becomes the present one


class PeakMemory:
    """The largest memory in use since :meth:`begin`, in MB (10^6 bytes).

    The kernel's own mark is set back and read, so nothing is sampled and no peak is missed. Where it cannot be set back
    (it is Linux's, and a sandbox may forbid it) there is no number: the mark of the whole life of a process says
    nothing about one round.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = False  # whether the kernel's mark was set back when the round began

    def begin(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            _RESET.write_text(_FORGET_PEAK, encoding="ascii")
            self._known = True
        except OSError:
            self._known = False

    def of_process(self) -> float | None:
        """Resident memory of this process; None where the system does not give it for a while alone."""
        if not self._known:
            return None
        mark = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
        if mark is None:
            return None
        return int(mark[1]) * 1024 / MB

    def of_gpu(self) -> float | None:
        """Memory of torch's tensors on the GPU; None on another device."""
        if self._device.type != "cuda":
            return None
        import torch

        return torch.cuda.max_memory_allocated(self._device) / MB
