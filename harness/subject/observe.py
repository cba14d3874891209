"""Which code ran: the experts class whose ``apply`` was entered, and the dtype of A entering each GEMM."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_FUSED = "vllm.model_executor.layers.fused_moe.fused_moe"
_LAUNCHERS = (
    "invoke_fused_moe_triton_kernel",
    "invoke_fused_moe_wna16_triton_kernel",
    "invoke_fused_moe_wna16_cuda_kernel",
    "invoke_moe_batched_triton_kernel",
    "matmul_ogs",
)
LEGACY = "fused_experts"


@dataclass(slots=True)
class Observed:
    """Filled while ``watch`` is entered; in order of occurrence."""

    experts: list[str] = field(default_factory=list)
    gemm_dtypes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watch(experts_module: torch.nn.Module | None) -> Iterator[Observed]:
    """Observe one forward of the layer that owns ``experts_module``, or of the functional entry when None."""
    seen = Observed()
    with contextlib.ExitStack() as stack:
        kernel = getattr(getattr(experts_module, "quant_method", None), "moe_kernel", None)
        implementation = getattr(kernel, "fused_experts", None)
        for experts in _alternatives(implementation):
            stack.enter_context(_wrapped(experts, "apply", functools.partial(_saw, seen, type(experts).__name__)))
        fused = sys.modules.get(_FUSED)
        if fused is not None and hasattr(fused, "fused_experts_impl"):
            stack.enter_context(_wrapped(fused, "fused_experts_impl", lambda *_: seen.experts.append(LEGACY)))
        for module in _importers(_LAUNCHERS, len(sys.modules)):
            for name in _LAUNCHERS:
                if hasattr(module, name):
                    stack.enter_context(_wrapped(module, name, lambda a: seen.gemm_dtypes.append(_name(a))))
        yield seen


def _alternatives(implementation: Any) -> tuple[Any, ...]:
    """The experts that may run: the two behind a FallbackExperts, which chooses per batch, or the one there is."""
    if implementation is None:
        return ()
    inner = tuple(getattr(implementation, name, None) for name in ("experts", "fallback_experts"))
    return inner if None not in inner else (implementation,)


def _saw(seen: Observed, name: str, *_: Any) -> None:
    seen.experts.append(name)


def planned_class(experts_module: torch.nn.Module) -> str:
    """The experts class that will run, as far as the layer tells; LEGACY when it has no modular kernel."""
    method = getattr(experts_module, "quant_method", None)
    implementation = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return type(implementation).__name__ if implementation is not None else LEGACY


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1)
def _importers(names: tuple[str, ...], loaded: int) -> list[Any]:
    """Modules that hold one of ``names``; looked for again when another number of modules is ``loaded``: there are thousands."""
    prefix = _FUSED.rpartition(".")[0]
    modules = [module for key, module in sys.modules.items() if key.startswith(prefix) and module is not None]
    return [module for module in modules if any(name in vars(module) for name in names)]


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, record: Callable[[Any], None]) -> Iterator[None]:
    """``owner.name`` telling ``record`` its first argument, by position or by name, before it begins; the attribute is put back, or removed
    where it was inherited."""
    original, own = getattr(owner, name), name in vars(owner)
    first = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        record(args[0] if args else kwargs.get(first))
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
