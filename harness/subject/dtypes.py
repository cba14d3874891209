"""Torch dtypes of the number formats."""

from __future__ import annotations

import torch

from references.vocabulary import Format

TORCH: dict[Format, torch.dtype] = {
    Format.FP32: torch.float32,
    Format.BF16: torch.bfloat16,
    Format.FP16: torch.float16,
    Format.INT8: torch.int8,
    Format.E4M3FN: torch.float8_e4m3fn,
    Format.E5M2: torch.float8_e5m2,
}
