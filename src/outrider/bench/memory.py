"""Measure peak memory: of this process, or of tensors on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # clears the high-water mark, see proc(5)


class PeakMemory:
    """Peak memory since the creation of this object. On a CPU: resident memory of the process, with all loaded models."""

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
        """Return the peak in bytes, or None if it is unknown."""
        if self._device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        if not self._can_read:
            return None
        lines = STATUS.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
