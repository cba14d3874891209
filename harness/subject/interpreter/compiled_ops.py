"""CPU implementations of the compiled operators that the MoE paths call, registered under vLLM's own schemas.

Each family has its file; each function states the csrc file whose float32 arithmetic it repeats, operation by operation.
An operator that already has a CPU kernel is left alone, one whose schema this vLLM does not know is skipped. Calling an
operator that has no implementation here ends in torch's NotImplementedError, which names it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from harness.subject.interpreter import ops_activation, ops_humming, ops_masked, ops_moe, ops_quant

if TYPE_CHECKING:
    from collections.abc import Callable

IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    **ops_moe.IMPLEMENTATIONS,
    **ops_activation.IMPLEMENTATIONS,
    **ops_quant.IMPLEMENTATIONS,
    **ops_humming.IMPLEMENTATIONS,
    **ops_masked.IMPLEMENTATIONS,
}

_MISSING = re.compile(r"Could not run '([\w:.]+)' with arguments from the 'CPU' backend")
_libraries: list[torch.library.Library] = []  # a Library takes its registrations with it when it is collected


def _known(name: str) -> bool:
    return bool(torch._C._jit_get_schemas_for_operator(name))


def register() -> tuple[str, ...]:
    """Register what is missing; the names registered, sorted. A second call registers nothing."""
    done = []
    for name in sorted(IMPLEMENTATIONS):
        if not _known(name) or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            continue
        namespace, _, operator = name.partition("::")
        library = torch.library.Library(namespace, "IMPL", "CPU")
        library.impl(operator, IMPLEMENTATIONS[name])
        _libraries.append(library)
        done.append(name)
    return tuple(done)


def missing_operator(error: BaseException) -> str | None:
    """Name of the compiled operator whose lack of a CPU implementation ``error`` reports; None for any other error."""
    found = _MISSING.search(str(error)) if isinstance(error, NotImplementedError) else None
    return found[1] if found else None
