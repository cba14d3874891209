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
_OPERATORS = "vllm._custom_ops"  # called through their module
_LAUNCHERS = {  # which argument is A; DeepGEMM's is a pair, A and its scales
    "invoke_fused_moe_triton_kernel": 0,
    "invoke_fused_moe_wna16_triton_kernel": 0,
    "invoke_fused_moe_wna16_cuda_kernel": 0,
    "invoke_moe_batched_triton_kernel": 0,
    "invoke_fused_moe_nvfp4_emulation_kernel": 0,
    "matmul_ogs": 0,
    "moe_wna16_marlin_gemm": 0,
    "cutlass_moe_mm": 1,
    "cutlass_w4a8_moe_mm": 1,
    "m_grouped_fp8_gemm_nt_contiguous": 0,
    "fp8_m_grouped_gemm_nt_masked": 0,
}
_HUMMING, _INPUTS = "humming_forward", 1  # a method of the experts
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

    def enters(a: Any) -> None:
        seen.gemm_dtypes.append(_name(a))

    with contextlib.ExitStack() as stack:
        kernel = getattr(getattr(experts_module, "quant_method", None), "moe_kernel", None)
        implementation = getattr(kernel, "fused_experts", None)
        for experts in _alternatives(implementation):
            stack.enter_context(_wrapped(experts, "apply", functools.partial(_saw, seen, type(experts).__name__)))
            if hasattr(experts, _HUMMING):
                stack.enter_context(_wrapped(experts, _HUMMING, enters, _INPUTS))
        fused = sys.modules.get(_FUSED)
        if fused is not None and hasattr(fused, "fused_experts_impl"):
            stack.enter_context(_wrapped(fused, "fused_experts_impl", lambda *_: seen.experts.append(LEGACY)))
        for module in _importers(len(sys.modules)):
            for name, which in _LAUNCHERS.items():
                if hasattr(module, name):
                    stack.enter_context(_wrapped(module, name, enters, which))
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


def _name(operand: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> str:
    return str((operand[0] if isinstance(operand, tuple) else operand).dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1)
def _importers(loaded: int) -> list[Any]:
    """Modules that hold a launcher; looked for again when another number of modules is ``loaded``: there are thousands."""
    prefix = _FUSED.rpartition(".")[0]
    modules = [module for key, module in sys.modules.items() if key.startswith((prefix, _OPERATORS)) and module is not None]
    return [module for module in modules if any(name in vars(module) for name in _LAUNCHERS)]


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, record: Callable[[Any], None], which: int = 0) -> Iterator[None]:
    """``owner.name`` telling ``record`` one argument, by position or by name, before it begins; the attribute is put back, or removed where
    it was inherited."""
    original, own = getattr(owner, name), name in vars(owner)
    named = dict(enumerate(inspect.signature(original).parameters)).get(which)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        record(args[which] if len(args) > which else kwargs.get(named))
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
