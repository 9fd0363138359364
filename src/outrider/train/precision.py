"""Choose the precision of training: the dtype of matrix products."""

from __future__ import annotations

import torch

from outrider.runner import kernels


def arithmetic_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 on a GPU with units for it and on a CPU with instructions for it; else float32."""
    is_fast = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else kernels.has_fast_bfloat16()
    return torch.bfloat16 if is_fast else torch.float32


def arithmetic(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Context manager: compute products in this dtype; float32 is the default."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
