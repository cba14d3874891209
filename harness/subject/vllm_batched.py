"""Experts that take rows packed per expert, [E, max_num_tokens, H], driven on one rank.

No oracle chooses them without an all-to-all, but vLLM's own modular kernel runs them on one rank with its own BatchedPrepareAndFinalize
(prepare_finalize/batched.py): it packs and quantizes the rows of each expert, and weighs and adds what comes back. Weights, scales, the
quant config and the routing are those of the functional entry (vllm_direct.py). Before it loads, the experts class is asked whether it
supports the configuration, as an oracle would ask.

A dispatch leaves garbage behind the rows of an expert: there the packed rows and their scales are NaN, in every run.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from cases.case import ActScale, Routing
from cases.gating import swiglu
from harness.subject import Loaded, LoadFailed, Ran, RunFailed, SubjectUnavailable, modes, vllm_compat
from harness.subject.dtypes import TORCH
from harness.subject.errors import verbatim
from harness.subject.observe import watch
from harness.subject.vllm_direct import BLOCK, quant_config, routing, stack
from references.vocabulary import Format, Layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject.modes import Mode

_NEEDED = ("modular kernel", "batched rows", "moe config", "parallel config", "routing methods")
_DEEP_GEMM = "BatchedDeepGemmExperts"
_CLASSES = {"deep_gemm": _DEEP_GEMM}  # by the backend that is forced; all others have Triton's
_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
_SPARE = 3  # rows of an expert that no token fills
_WEIGHT_KEYS = {
    (Format.E4M3FN, Layout.TENSOR): "kFp8StaticTensorSym",
    (Format.E4M3FN, Layout.CHANNEL): "kFp8StaticChannelSym",
    (Format.E4M3FN, Layout.BLOCK128): "kFp8Static128BlockSym",
    (Format.INT8, Layout.TENSOR): "kInt8StaticTensorSym",
    (Format.INT8, Layout.CHANNEL): "kInt8StaticChannelSym",
}
_ACTIVATION_KEYS = {
    (Format.E4M3FN, ActScale.STATIC_TENSOR): "kFp8StaticTensorSym",
    (Format.E4M3FN, ActScale.DYNAMIC_TENSOR): "kFp8DynamicTensorSym",
    (Format.E4M3FN, ActScale.DYNAMIC_TOKEN): "kFp8DynamicTokenSym",
    (Format.E4M3FN, ActScale.DYNAMIC_GROUP128): "kFp8Dynamic128Sym",
    (Format.INT8, ActScale.STATIC_TENSOR): "kInt8StaticTensorSym",
    (Format.INT8, ActScale.DYNAMIC_TENSOR): "kInt8DynamicTensorSym",
    (Format.INT8, ActScale.DYNAMIC_TOKEN): "kInt8DynamicTokenSym",
}


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Handle: everything but the batch."""

    case: MoECase
    kernel: Any  # vLLM's modular kernel
    w1: torch.Tensor
    w2: torch.Tensor
    activation: Any  # member of vLLM's MoEActivation
    config: Any  # VllmConfig
    device: str


def loaded_here(loaded: Loaded) -> bool:
    """Whether ``load`` of this module made it."""
    return isinstance(loaded.handle, _Kernel)


def load(case: MoECase, checkpoint: Checkpoint, device: str, backend: str = "batched_triton") -> Loaded:
    """Stack the checkpoint's tensors, ask the experts class, build the kernel.

    Raises:
        LoadFailed: vLLM raised, or the experts class says that it does not support the configuration (refused).
        SubjectUnavailable: this vLLM has no such kernel.
    """
    surface = vllm_compat.probe_surface()
    called = _CLASSES.get(backend, "BatchedTritonExperts")
    if missing := [what for what in (*_NEEDED, called) if what not in surface]:
        raise SubjectUnavailable(f"vllm {surface.version} has no {missing[0]}: leave out --entry batched")
    dtype = TORCH[case.dtype]
    config = vllm_compat.vllm_config(
        "triton", dtype, experts=case.experts, top_k=case.top_k, hidden=case.hidden, intermediate=case.intermediate
    )
    stacked = {name: tensor.to(device) for name, tensor in stack(case, checkpoint.tensors).items()}
    experts = surface[called]
    _know_capture(importlib.import_module(experts.__module__))
    capacity = case.tokens + (0 if case.routing is Routing.SINGLE else _SPARE)
    try:
        with vllm_compat.current_config(config):
            vllm_compat.prepare_process(device)
            moe_config = _moe_config(case, dtype, capacity, device)
            _ask(experts, moe_config, case)
            if called == _DEEP_GEMM:
                names = ("w1", "w2", "w1_scale", "w2_scale")
                made = surface["DeepGEMM weights"](*(stacked[name] for name in names), tuple(BLOCK))
                stacked |= dict(zip(names, made, strict=True))
            ranks = {"max_num_tokens": capacity, "num_dispatchers": 1}
            rows = surface["batched rows"](**ranks, num_local_experts=case.experts, rank=0)
            rows.prepare = _spoilt(rows.prepare)
            kernel = surface["modular kernel"](rows, experts(moe_config, quant_config(case, stacked), **ranks))
    except LoadFailed:
        raise
    except Exception as error:
        raise LoadFailed(verbatim(error)) from error
    return Loaded(
        handle=_Kernel(case, kernel, stacked["w1"], stacked["w2"], moe_config.activation, config, device),
        quant_method=type(rows).__name__,
        experts_class=experts.__name__,
        parameters=stacked,
    )


def run(loaded: Loaded, batch: Batch) -> Ran:
    """One call of the kernel.

    Raises:
        RunFailed: vLLM raised.
    """
    call = loaded.handle
    assert isinstance(call, _Kernel)
    hidden_states = batch.hidden_states.to(call.device, copy=True)  # the router weight is multiplied into it
    topk_weights, topk_ids = routing(call.case, batch)
    with watch(SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=call.kernel))) as seen:
        try:
            with vllm_compat.forward_context(call.config, hidden_states.shape[0]):
                output = _function(call)(hidden_states, topk_weights.to(call.device), topk_ids.to(call.device))
            output = output.detach().cpu().clone()
        except Exception as error:
            raise RunFailed(verbatim(error)) from error
    return Ran(output=output, experts_class=seen.experts[0] if seen.experts else "", gemm_dtypes=tuple(seen.gemm_dtypes))


def prepare(loaded: Loaded, batch: Batch, mode: Mode) -> Callable[[Batch], torch.Tensor]:
    """See harness/subject/modes.py."""
    call = loaded.handle
    assert isinstance(call, _Kernel)
    return modes.prepare(call.config, _function(call), lambda each: (each.hidden_states, *routing(call.case, each)), batch, mode)


def _function(call: _Kernel) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(hidden_states, topk_weights, topk_ids) -> [M, H], under a forward context."""
    on_input, experts = call.case.router_weight_on_input, call.case.experts

    def function(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return call.kernel.apply(
            hidden_states,
            call.w1,
            call.w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=call.activation,
            global_num_experts=experts,
            expert_map=None,
            apply_router_weight_on_input=on_input,
        )

    return function


def _know_capture(module: ModuleType) -> None:
    """vLLM asks ``torch.Stream.is_capturing``, which a torch older than the one it requires lacks: there, ask torch.cuda the same."""
    if hasattr(module, "_is_capturing_or_compiling") and not hasattr(torch.Stream, "is_capturing") and torch.cuda.is_available():
        module._is_capturing_or_compiling = lambda: torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()


def _spoilt(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """``prepare`` with NaN in the rows that no token fills, and in their scales where each row has its own."""

    def prepared(*args: Any, **kwargs: Any) -> Any:
        rows, scale, meta, *rest = prepare(*args, **kwargs)
        unused = torch.arange(rows.shape[1], device=rows.device) >= meta.expert_num_tokens[: rows.shape[0], None]
        if rows.dtype.itemsize == 1:
            rows.view(torch.uint8)[unused] = 0x7F  # NaN in e4m3fn
        else:
            rows[unused] = torch.nan
        if scale is not None and scale.shape[1] == rows.shape[1]:
            scale[unused] = torch.nan
        return rows, scale, meta, *rest

    return prepared


def _moe_config(case: MoECase, dtype: torch.dtype, capacity: int, device: str) -> Any:
    surface = vllm_compat.probe_surface()
    return surface["moe config"](
        num_experts=case.experts,
        experts_per_token=case.top_k,
        hidden_dim=case.hidden,
        intermediate_size=case.intermediate,
        num_local_experts=case.experts,
        num_logical_experts=case.experts,
        activation=surface["activation enum"](case.activation.value),
        device=device,
        routing_method=surface["routing methods"].Renormalize if case.renormalize else surface["routing methods"].Default,
        moe_parallel_config=surface["parallel config"].make_no_parallel(),
        in_dtype=dtype,
        max_num_tokens=capacity,
        has_bias=case.bias,
        **vllm_compat.activation_parameters(case.activation.value, swiglu(case)),
    )


def _ask(experts: Any, moe_config: Any, case: MoECase) -> None:
    """Raises LoadFailed, refused, with the reason that the experts class gives."""
    keys = importlib.import_module(_KEYS)

    def key(table: dict[Any, str], scale: Layout | ActScale) -> Any:
        return getattr(keys, table[case.weight, scale]) if (case.weight, scale) in table else None

    supported, reason = experts.is_supported_config(
        experts, moe_config, key(_WEIGHT_KEYS, case.weight_scale), key(_ACTIVATION_KEYS, case.act_scale), experts.activation_format()
    )
    if not supported:
        raise LoadFailed(f"{experts.__name__}: {reason}", refused=True)
