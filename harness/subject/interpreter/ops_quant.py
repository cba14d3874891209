"""Activation and weight quantizers.

Codes are int8 or float8_e4m3fn, scales float32 and multiply. csrc/libtorch_stable/quantization/w8a8/int8/scaled_quant.cu,
.../w8a8/fp8/common.{cu,cuh}, .../w8a8/fp8/per_token_group_quant.cu, .../fused_kernels/fused_silu_mul_block_quant.cu.

``cvt.rni.sat`` rounds half to even and saturates, NaN becomes 0. fp8 conversions round half to even after
fminf/fmaxf, which return the operand that is not NaN: a NaN quotient becomes +448. Where a kernel multiplies by a reciprocal
the reciprocal is rounded to float32 first. What the sources leave open was read off the sm_90 code of the 0.33.0 wheel
(``cuobjdump -sass``): divisions are IEEE, and the group quantizers multiply by the reciprocal of their scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.subject.interpreter.ops_activation import F32, at_least, at_most

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

E4M3_MAX = 448.0
MIN_FP8_SCALE = float(F32(1.0) / (F32(E4M3_MAX) * F32(512.0)))  # min_scaling_factor<c10::Float8_e4m3fn>
FP8_DTYPES = (torch.float8_e4m3fn,)


def _check(condition: bool, message: str) -> None:
    if not condition:  # the kernels' own STD_TORCH_CHECK texts, so that a refusal reads like on a GPU
        raise RuntimeError(message)


def _check_scale(scale: torch.Tensor) -> None:
    # const_data_ptr<float>() of torch's stable Tensor throws on any other dtype
    found = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float64: "Double"}.get(scale.dtype, str(scale.dtype))
    _check(scale.dtype == torch.float32, f"expected scalar type Float but found {found}")


def to_int8_rn(x: torch.Tensor) -> torch.Tensor:
    """float32 -> int8 like ``cvt.rni.sat.s8.f32``."""
    return torch.nan_to_num(torch.round(x), nan=0.0, posinf=127.0, neginf=-128.0).clamp(-128, 127).to(torch.int8)


def to_e4m3_saturating(x: torch.Tensor) -> torch.Tensor:
    """float32 -> float8_e4m3fn like scaled_fp8_conversion: clamp with fminf/fmaxf, then round half to even."""
    bounded = torch.fmax(torch.full_like(x, -E4M3_MAX), torch.fmin(x, torch.full_like(x, E4M3_MAX)))
    return bounded.to(torch.float8_e4m3fn)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of the last dimension, kept; by fmaxf, which passes NaN over."""
    return x.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)


def static_scaled_int8_quant(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None = None) -> None:
    """code = rni(x / scale); asymmetric: rni(x * (1 / scale)) + azp, saturated."""
    _check(scale.numel() == 1, "Expected scale.numel() == 1 to be true, but got false.")
    _check_scale(scale)
    if azp is None:
        out.copy_(to_int8_rn(x.float() / scale.reshape(())))
        return
    rounded = torch.round((x.float() * (1.0 / scale.reshape(()))).double()).nan_to_num(nan=0.0).clamp(-(2**31), 2**31 - 1)
    out.copy_((rounded.long() + azp.reshape(()).long()).to(torch.int32).clamp(-128, 127).to(torch.int8))  # the addition wraps


def dynamic_scaled_int8_quant(out: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, azp: torch.Tensor | None = None) -> None:
    """Per row: scale = amax / 127, code = rni(x * (127 / amax)), all-zero rows give zeros. Symmetric only."""
    if azp is not None:
        raise NotImplementedError("asymmetric dynamic_scaled_int8_quant has no CPU implementation in the interpreter lane")
    rows = x.float().reshape(-1, x.shape[-1])
    amax = amax_of(rows)
    scales.copy_((amax / 127.0).reshape(scales.shape))
    inverse = torch.where(amax == 0, torch.zeros_like(amax), torch.full_like(amax, 127.0) / amax)  # number / tensor rounds twice
    out.copy_(to_int8_rn(rows * inverse).reshape(out.shape))


def static_scaled_fp8_quant(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, group_shape: Sequence[int] | None = None) -> None:
    """code = e4m3(x * (1 / scale)). One scale, or [M / group_m, N / group_n], or one dimension with ``group_shape``."""
    _check_scale(scale)
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    if scale.numel() == 1:
        inverse = (1.0 / scale).reshape(1, 1)
    else:
        if scale.dim() == 1:
            _check(group_shape is not None, "1D scale requires explicit group_shape to disambiguate per-channel vs per-token quantization.")
            assert group_shape is not None
            group_m, group_n = (full if size == -1 else size for size, full in zip(group_shape, (rows, columns), strict=True))
            scale = scale.reshape(rows // group_m, columns // group_n)
        _check(scale.dim() == 2, f"scale must be 0D, 1D, or 2D tensor, but got {scale.dim()}D")
        for axis, (size, groups) in enumerate(zip((rows, columns), scale.shape, strict=True)):
            _check(size % groups == 0, f"dimension {axis} ({size}) must be divisible by scale.size({axis}) ({groups})")
        inverse = 1.0 / scale
        inverse = inverse.repeat_interleave(rows // scale.shape[0], 0).repeat_interleave(columns // scale.shape[1], 1)
    out[:rows].copy_(to_e4m3_saturating(x.float().reshape(rows, columns) * inverse).reshape(x.shape))


def dynamic_scaled_fp8_quant(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
    """scale = amax(x) / 448 with no floor, code = e4m3(x * (1 / scale))."""
    values = x.float()
    scale.copy_((amax_of(values.reshape(-1)) / E4M3_MAX).reshape(scale.shape))
    out[: x.shape[0]].copy_(to_e4m3_saturating(values * (1.0 / scale.reshape(()))))


def dynamic_per_token_scaled_fp8_quant(
    out: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, scale_ub: torch.Tensor | None = None
) -> None:
    """Per row: scale = max(min(amax, ub) / 448, 1 / (448 * 512)), code = e4m3(x / scale)."""
    values = x.float()
    amax = amax_of(values)
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub.reshape(()))
    scale = (amax / E4M3_MAX).clamp(min=MIN_FP8_SCALE)
    scales[: x.shape[0]].copy_(scale.reshape(-1, *([1] * (scales.dim() - 1))))
    out[: x.shape[0]].copy_(to_e4m3_saturating(values / scale))


def _group_scales(x: torch.Tensor, group: int, eps: float, largest: float, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [M, G, group] float32, scale [M, G, 1]); scale = max(amax, eps) / largest."""
    grouped = x.float().reshape(x.shape[0], -1, group)
    scale = amax_of(grouped).clamp(min=float(F32(eps))) / largest
    if ue8m0:  # exponents of float32 are exact in float64, log2 of the float32 kernel is not: ulp-close to a power of two
        scale = torch.exp2(torch.ceil(torch.log2(scale.clamp(min=1e-10))))
    return grouped, scale


def per_token_group_fp8_quant(
    x: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    *_layout: object,
) -> None:
    """Per (row, group): scale = max(amax, eps) / 448, code = e4m3(clamp(x * (1 / scale))). ``scales`` may be strided."""
    grouped, scale = _group_scales(x, group_size, eps, fp8_max, scale_ue8m0)
    scales.copy_(scale.squeeze(-1).reshape(scales.shape))
    quotient = grouped * (1.0 / scale)
    out.copy_(at_most(at_least(quotient, fp8_min), fp8_max).to(out.dtype).reshape(out.shape))


def per_token_group_quant_int8(
    x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, group_size: int, eps: float, int8_min: float, int8_max: float
) -> None:
    """Per (row, group): scale = max(amax, eps) / 127, code = int8(clamp(x * (1 / scale))); the C++ cast truncates toward zero."""
    rows = x.reshape(-1, x.shape[-1])
    grouped, scale = _group_scales(rows, group_size, eps, int8_max, False)
    scales.copy_(scale.squeeze(-1).reshape(scales.shape))
    quotient = grouped * (1.0 / scale)
    out.copy_(torch.trunc(at_most(at_least(quotient, int8_min), int8_max)).to(torch.int8).reshape(out.shape))


def silu_and_mul_per_block_quant(
    out: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    scale_ub: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    """silu(gate) * up per group, kept in float32, scale = max(amax / 448, 1 / (448 * 512)), code = e4m3(v / scale).

    silu(g) is g * (1 / (1 + exp(-g))) here, and is not rounded to the input dtype.
    """
    _check(x.dtype in (torch.float16, torch.bfloat16), "Input must be FP16 or BF16")
    _check(out.dtype in FP8_DTYPES, f"silu_and_mul_per_block_quant to {out.dtype} has no CPU implementation in the interpreter lane")
    _check(group_size in (64, 128), f"Unsupported group size: {group_size}")
    _check(out.shape[-1] % group_size == 0, "hidden_size must be divisible by group_size")
    gate, up = x.float().chunk(2, -1)
    value = gate * (1.0 / (1.0 + torch.exp(-gate))) * up
    grouped = value.reshape(value.shape[0], -1, group_size)
    scale = amax_of(grouped) / E4M3_MAX
    if scale_ub is not None:
        scale = torch.minimum(scale, scale_ub.reshape(()))
    scale = scale.clamp(min=MIN_FP8_SCALE)
    scales.copy_(scale.squeeze(-1))  # a transposed scale tensor arrives as a transposed view
    out.copy_(to_e4m3_saturating(grouped / scale).reshape(out.shape))


IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "_C::static_scaled_int8_quant": static_scaled_int8_quant,
    "_C::dynamic_scaled_int8_quant": dynamic_scaled_int8_quant,
    "_C::static_scaled_fp8_quant": static_scaled_fp8_quant,
    "_C::dynamic_scaled_fp8_quant": dynamic_scaled_fp8_quant,
    "_C::dynamic_per_token_scaled_fp8_quant": dynamic_per_token_scaled_fp8_quant,
    "_C::per_token_group_fp8_quant": per_token_group_fp8_quant,
    "_C::per_token_group_quant_int8": per_token_group_quant_int8,
    "_C::silu_and_mul_per_block_quant": silu_and_mul_per_block_quant,
}
