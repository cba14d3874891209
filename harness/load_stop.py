"""Where loading ends for want of a GPU, on a CPU that answers as one."""

from __future__ import annotations

import re

_NEEDS_GPU = re.compile(
    r"compiled operator (\S+) has no CPU implementation in the interpreter lane"
    r"|(Found no NVIDIA driver|tensor must be on gpu|device must be a cuda device|Input must be on CUDA device|weight must live on CUDA)"
)


def needs_gpu(detail: str) -> str:
    """What of ``detail``, vLLM's words, needs the GPU: an operator, or a tensor that must be there. Empty: nothing."""
    needs = _NEEDS_GPU.search(detail)
    return "" if needs is None else needs[1] or f"a tensor on the GPU ({needs[2]})"
