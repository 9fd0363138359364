"""The most memory that was taken while something ran: of this process, or of the GPU's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what proc(5) says clears the high-water mark


class PeakMemory:
    """Starts to watch when made. On a CPU it is the process's resident memory, with every model that is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            RESET.write_text(RESET_PEAK)
            self._can_read = True
        except OSError:
            self._can_read = False

    def read(self) -> int | None:
        """Bytes at the peak since then; None where the system does not tell."""
        if self._device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        if not self._can_read:
            return None
        lines = STATUS.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
