"""One forward of what was loaded, watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.subject import Ran, RunFailed, vllm_compat
from harness.subject.errors import verbatim
from harness.subject.observe import watch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def forward(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], *, config: Any, device: str, watched: Any | None
) -> Ran:
    """``function`` of copies of ``inputs``, hidden_states [M, H] first, on ``device`` under vLLM's ``config``: output [M, H].

    watched: the module whose experts run, or None for the functional entry; see observe.py.

    Raises:
        RunFailed: vLLM raised.
    """
    given = tuple(each.to(device, copy=True) for each in inputs)  # an activation, or a router weight on the input, may work in place
    with watch(watched) as seen:
        try:
            with vllm_compat.forward_context(config, given[0].shape[0]):
                output = function(*given).detach().cpu().clone()
        except Exception as error:
            raise RunFailed(verbatim(error)) from error
    return Ran(output=output, experts_class=seen.experts[0] if seen.experts else "", gemm_dtypes=tuple(seen.gemm_dtypes))
