"""vLLM's legacy functional entry, ``fused_experts``, called with the tensors of a checkpoint and vLLM's own quant config.

What a layer's loader would do is done here in a few plain torch operations, so that the kernel is tested where a layer above
it is broken:

- ``w1`` [E, 2I or I, H] gate rows first, ``w2`` [E, H, I]: stacked, codes untouched.
- Scales stacked alike: per tensor [E], per channel [E, N, 1], per block [E, ceil(N/128), ceil(K/128)].
- A gated per-tensor w13 has two scales where the kernel takes one. As vLLM's loaders do (fp8_utils.py
  ``process_fp8_weight_tensor_strategy_moe``), both halves are dequantized to float16 and requantized to the larger scale.
- Static input scales: the maximum over experts, one per GEMM.
- Routing: softmax in float64, the k largest in descending order, renormalized on request, rounded once to float32: here the
  router weights are given, so they are what the reference is given too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cases.case import ActScale
from harness.subject import Loaded, modes, vllm_compat
from harness.subject.dtypes import TORCH
from harness.subject.forward import forward
from harness.subject.observe import LEGACY
from harness.subject.views import View, handed
from harness.subject.vllm_loading import loading
from references.vocabulary import Format, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject import Ran
    from harness.subject.modes import Mode

BLOCK = [128, 128]
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class _Call:
    """Handle: everything but the batch."""

    case: MoECase
    w1: torch.Tensor
    w2: torch.Tensor
    quant_config: Any
    activation: Any  # member of vLLM's MoEActivation
    config: Any  # VllmConfig
    device: str


def load(case: MoECase, checkpoint: Checkpoint, device: str, views: Mapping[str, View] | None = None) -> Loaded:
    """Stack the checkpoint's tensors and build the quant config; ``views``: scale tensors handed over in another form.

    Raises:
        LoadFailed: vLLM's config builder raised.
    """
    surface = vllm_compat.probe_surface()
    stacked = {name: tensor.to(device) for name, tensor in stack(case, checkpoint.tensors).items()}
    stacked |= handed(stacked, views or {})
    dtype = TORCH[case.dtype]
    config = vllm_compat.vllm_config(
        "triton", dtype, experts=case.experts, top_k=case.top_k, hidden=case.hidden, intermediate=case.intermediate
    )
    with loading() as stage:
        stage.choosing = False  # nothing is
        activation = surface["activation enum"](case.activation.value)
        made = quant_config(case, stacked)
    return Loaded(
        handle=_Call(case, stacked["w1"], stacked["w2"], made, activation, config, device),
        quant_method=LEGACY,
        experts_class=LEGACY,
        parameters=stacked,
    )


def run(loaded: Loaded, batch: Batch) -> Ran:
    """One call of ``fused_experts``.

    Raises:
        RunFailed: vLLM raised.
    """
    call = loaded.handle
    assert isinstance(call, _Call)
    inputs = (batch.hidden_states, *routing(call.case, batch))
    return forward(_function(call), inputs, config=call.config, device=call.device, watched=None)


def prepare(loaded: Loaded, batch: Batch, mode: Mode) -> Callable[[Batch], torch.Tensor]:
    """As harness/subject/modes.py says. Raises RunFailed."""
    call = loaded.handle
    assert isinstance(call, _Call)
    return modes.prepare(call.config, _function(call), lambda each: (each.hidden_states, *routing(call.case, each)), batch, mode)


def _function(call: _Call) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(hidden_states, topk_weights, topk_ids) -> [M, H], under a forward context."""
    fused_experts, on_input = vllm_compat.probe_surface()["fused_experts"], call.case.router_weight_on_input
    given = {"activation": call.activation, "apply_router_weight_on_input": on_input, "quant_config": call.quant_config}

    def function(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return fused_experts(hidden_states, call.w1, call.w2, topk_weights, topk_ids, **given)

    return function


def routing(case: MoECase, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_weights [M, k] float32, topk_ids [M, k] int32): the batch's own where it has them."""
    if batch.topk_weights is not None and batch.topk_ids is not None:
        return batch.topk_weights.clone(), batch.topk_ids.to(torch.int32)
    return route(batch.router_logits, case.top_k, case.renormalize)


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_weights [M, k] float32, topk_ids [M, k] int32) from router_logits [M, E], in float64 and rounded once."""
    probability = torch.softmax(router_logits.double(), dim=-1)
    weights, ids = torch.topk(probability, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.float().contiguous(), ids.to(torch.int32)


def stack(case: MoECase, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``w1, w2`` and what exists of ``w1_scale, w2_scale, a1_scale, a2_scale, w1_bias, w2_bias``, from checkpoint tensors."""
    upper = tuple(name for name in case.projections if name != "down_proj")
    out: dict[str, torch.Tensor] = {}
    for stem, index, names in (("w1", 1, upper), ("w2", 2, ("down_proj",))):
        halves = [[tensors[f"{expert}.{name}.weight"] for name in names] for expert in range(case.experts)]
        scales = [[_scale(case, tensors, f"{expert}.{name}") for name in names] for expert in range(case.experts)]
        if case.weight_scale is Layout.TENSOR:
            merged = [requantize_to_max(codes, scale) for codes, scale in zip(halves, scales, strict=True)]
            out[stem] = torch.stack([codes for codes, _ in merged])
            out[f"{stem}_scale"] = torch.stack([scale for _, scale in merged])
        else:
            out[stem] = torch.stack([torch.cat(parts) for parts in halves])
            if case.weight_scale is not Layout.NONE:
                out[f"{stem}_scale"] = torch.stack([torch.cat(parts) for parts in scales])
        if case.act_scale is ActScale.STATIC_TENSOR:
            inputs = [tensors[f"{expert}.{name}.input_scale"].reshape(()) for expert in range(case.experts) for name in names]
            out[f"a{index}_scale"] = torch.stack(inputs).max().reshape(1)
        if case.bias:
            biases = [torch.cat([tensors[f"{expert}.{name}.bias"] for name in names]) for expert in range(case.experts)]
            out[f"{stem}_bias"] = torch.stack(biases)
    return out


def _scale(case: MoECase, tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """One projection's scale: [] per tensor, [N, 1] per channel, 2-D per block."""
    if case.weight_scale is Layout.NONE:
        return torch.empty(0)
    scale = tensors[f"{prefix}.weight_scale_inv"] if f"{prefix}.weight_scale_inv" in tensors else tensors[f"{prefix}.weight_scale"]
    if case.weight_scale is Layout.TENSOR:
        return scale.reshape(())
    return scale.reshape(-1, 1) if case.weight_scale is Layout.CHANNEL else scale


def requantize_to_max(codes: list[torch.Tensor], scales: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """([sum N, K] codes, [] float32): one scale for the halves of a w13, the largest; a single half is left as it is.

    codes -> float16(codes * scale), product in float32 -> int8: round half even of value / max, saturated;
    e4m3fn: round half even of value * (1 / max), saturated.
    """
    if len(codes) == 1:
        return codes[0], scales[0]
    largest = torch.stack(scales).max()
    out = []
    for part, scale in zip(codes, scales, strict=True):
        value = (part.float() * scale).to(torch.float16).float()
        if part.dtype == torch.int8:
            out.append(torch.round(value / largest).clamp(-128, 127).to(torch.int8))
        else:
            out.append((value * (1.0 / largest)).clamp(-E4M3_MAX, E4M3_MAX).to(part.dtype))
    return torch.cat(out), largest


def quant_config(case: MoECase, stacked: dict[str, torch.Tensor]) -> Any:
    """vLLM's FusedMoEQuantConfig over what ``stack`` made."""
    surface = vllm_compat.probe_surface()
    biases = {"w1_bias": stacked.get("w1_bias"), "w2_bias": stacked.get("w2_bias")}
    if not case.quantized:
        return surface["biased config"](**biases) if case.bias else surface["unquantized config"]
    scales = {"w1_scale": stacked["w1_scale"], "w2_scale": stacked["w2_scale"]}
    inputs = {"a1_scale": stacked.get("a1_scale"), "a2_scale": stacked.get("a2_scale")}
    token = case.act_scale is ActScale.DYNAMIC_TOKEN
    block = BLOCK if case.weight_scale is Layout.BLOCK128 else None
    if case.act_scale is ActScale.NONE:
        return surface["int8 w8a16 config"](**scales, **biases, w1_zp=None, w2_zp=None)
    if case.weight is Format.E4M3FN:
        return surface["fp8 w8a8 config"](**scales, **inputs, **biases, per_act_token_quant=token, block_shape=block)
    if block is not None:  # the named builder for int8 takes no block shape
        make = type(surface["unquantized config"]).make
        return make(torch.int8, block_shape=block, **scales, **inputs, **biases)
    return surface["int8 w8a8 config"](**scales, **inputs, **biases, per_act_token_quant=token)
