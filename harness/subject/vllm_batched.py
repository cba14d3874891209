"""Experts that take rows packed per expert, [E, max_num_tokens, H], driven on one rank.

No oracle chooses them without an all-to-all, but vLLM's own modular kernel runs them on one rank with its own BatchedPrepareAndFinalize
(prepare_finalize/batched.py): it packs and quantizes the rows of each expert, and weighs and adds what comes back. Weights, scales, the
quant config and the routing are those of the functional entry (vllm_direct.py). Before it loads, the experts class is asked whether it
supports the configuration, as an oracle would ask.

A dispatch leaves garbage behind the rows of an expert: there the packed rows and their scales are NaN, in every run.

DeepGEMM's masked GEMM stores whole tiles (deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh): one that reaches past an expert's max_num_tokens
rows overwrites the next expert's. It has room for whole tiles here, as with the 256 tokens a rank that vLLM takes by default.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from cases.case import ActScale, Routing
from cases.gating import swiglu
from harness.subject import Loaded, LoadFailed, SubjectUnavailable, modes, vllm_compat
from harness.subject.device import settle
from harness.subject.dtypes import TORCH
from harness.subject.forward import forward
from harness.subject.vllm_direct import BLOCK, quant_config, routing, stack
from harness.subject.vllm_loading import loading
from references.vocabulary import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject import Ran
    from harness.subject.modes import Mode

_NEEDED = ("modular kernel", "batched rows", "moe config", "parallel config", "routing methods")
_DEEP_GEMM = "BatchedDeepGemmExperts"
_CLASSES = {"deep_gemm": _DEEP_GEMM}  # by the backend that is forced; all others have Triton's
_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
_SPARE = 3  # rows of an expert that no token fills
_TILE = 128  # rows of DeepGEMM's largest tile
_WEIGHT_KEYS = {  # vLLM's names of FP8 schemes; INT8's are the same but for the dtype
    Layout.TENSOR: "kFp8StaticTensorSym",
    Layout.CHANNEL: "kFp8StaticChannelSym",
    Layout.BLOCK128: "kFp8Static128BlockSym",
}
_ACTIVATION_KEYS = {
    ActScale.STATIC_TENSOR: "kFp8StaticTensorSym",
    ActScale.DYNAMIC_TENSOR: "kFp8DynamicTensorSym",
    ActScale.DYNAMIC_TOKEN: "kFp8DynamicTokenSym",
    ActScale.DYNAMIC_GROUP128: "kFp8Dynamic128Sym",
}


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Handle: everything but the batch."""

    case: MoECase
    kernel: Any  # vLLM's modular kernel
    experts: type  # vLLM's experts class
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
    needed = (*_NEEDED, called, *(("DeepGEMM weights",) if called == _DEEP_GEMM else ()))
    if missing := [what for what in needed if what not in surface]:
        raise SubjectUnavailable(f"vllm {surface.version} has no {missing[0]}: leave out --entry batched")
    dtype = TORCH[case.dtype]
    config = vllm_compat.vllm_config(
        "triton", dtype, experts=case.experts, top_k=case.top_k, hidden=case.hidden, intermediate=case.intermediate
    )
    stacked = {name: tensor.to(device) for name, tensor in stack(case, checkpoint.tensors).items()}
    experts = surface[called]
    capacity = _capacity(case, called)
    with loading() as stage, vllm_compat.current_config(config):
        stage.choosing = False  # it is asked, below
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
        settle(device)
    return Loaded(
        handle=_Kernel(case, kernel, experts, stacked["w1"], stacked["w2"], moe_config.activation, config, device),
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
    watched = SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=call.kernel))
    inputs = (batch.hidden_states, *routing(call.case, batch))
    return forward(_function(call), inputs, config=call.config, device=call.device, watched=watched)


def prepare(loaded: Loaded, batch: Batch, mode: Mode) -> Callable[[Batch], torch.Tensor]:
    """As harness/subject/modes.py says. Raises RunFailed."""
    call = loaded.handle
    assert isinstance(call, _Kernel)
    return modes.prepare(call.config, _function(call), lambda each: (each.hidden_states, *routing(call.case, each)), batch, mode)


def _function(call: _Kernel) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(hidden_states, topk_weights, topk_ids) -> [M, H], under a forward context."""
    on_input, experts = call.case.router_weight_on_input, call.case.experts
    module = importlib.import_module(call.experts.__module__)

    def function(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        with _knowing_capture(module):
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


@contextlib.contextmanager
def _knowing_capture(module: ModuleType) -> Iterator[None]:
    """vLLM asks ``torch.Stream.is_capturing``; of a torch older than the one it requires, which lacks that, torch.cuda is asked instead."""
    name = "_is_capturing_or_compiling"
    original = getattr(module, name, None)
    if original is None or hasattr(torch.Stream, "is_capturing") or not torch.cuda.is_available():
        yield
        return
    setattr(module, name, lambda: torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())
    try:
        yield
    finally:
        setattr(module, name, original)


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


def _capacity(case: MoECase, called: str) -> int:
    """Rows there is room for in every expert."""
    rows = case.tokens + (0 if case.routing is Routing.SINGLE else _SPARE)
    return -(-rows // _TILE) * _TILE if called == _DEEP_GEMM else rows


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

    def key(name: str) -> Any:
        return replace(getattr(keys, name), dtype=TORCH[case.weight])

    weight = key(_WEIGHT_KEYS[case.weight_scale]) if case.quantized else None
    activation = key(_ACTIVATION_KEYS[case.act_scale]) if case.act_scale is not ActScale.NONE else None
    supported, reason = experts.is_supported_config(experts, moe_config, weight, activation, experts.activation_format())
    if not supported:
        raise LoadFailed(f"{experts.__name__}: {reason}", refused=True)
