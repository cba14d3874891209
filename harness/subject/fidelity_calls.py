"""What fidelity.py calls each operator with: random rows of every magnitude, values at the edges of the formats, NaN and infinity."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from harness.subject.interpreter import ops_humming

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ALIGN = "_moe_C::moe_align_block_size"
SOFTMAX = "_moe_C::topk_softmax"
FUSED = "_C::silu_and_mul_per_block_quant"
CLAMPED = "_C::silu_and_mul_with_clamp"
SWIGLUOAI = "_C::swigluoai_and_mul"
SITU = "_C::situ_and_mul"
MASKED = "_C::masked_moe_activation"
_MASKED_PARAMETERS = {"swigluoai": (7.0, 1.702, 0.0, 1.0, -1.0)}  # what vLLM passes; the others are told apart by these
_MASKED_ACTIVATIONS = (
    *("silu", "gelu", "gelu_tanh", "silu_with_clamp", "swigluoai_uninterleave", "swigluoai", "situ", "swiglustep"),
    *("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"),
)
_SPECIAL = (0.0, -0.0, 1e-30, -1e-30, 5.96e-8, 6.1e-5, 0.5, -0.5, 1.5, 2.5, -2.5, 126.5, 127.5, 448.0, 464.0, 480.0, -480.0, 65504.0)
_ENDLESS = (float("nan"), 1.0, -2.5, float("inf"), 0.0, -float("inf"), 3e-5)
_ENDLESS_ROWS = ((1.0, float("nan"), -3.0), (float("nan"),), (float("inf"), 1.0, -2.0), (-float("inf"), 0.5), _ENDLESS)


class Call(NamedTuple):
    """operator: namespace::name; arguments: on the CPU; outputs: positions of what is compared."""

    operator: str
    data: str
    arguments: tuple[object, ...]
    outputs: tuple[int, ...]


def _random(dtype: torch.dtype, rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ramp = 2.0 ** torch.linspace(-8, 6, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * ramp).to(dtype)


def _cycle(values: tuple[float, ...], count: int) -> torch.Tensor:
    return torch.tensor(values)[torch.arange(count) % len(values)]


def _inputs(columns: int) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in FLOATS:
        name = str(dtype).removeprefix("torch.")
        yield f"{name} random", _random(dtype, 37, columns, 1)
        yield f"{name} special", _cycle(_SPECIAL, 5 * columns).reshape(5, columns).to(dtype)
        yield f"{name} endless", torch.stack([_cycle(values, columns) for values in _ENDLESS_ROWS]).to(dtype)


def compiled() -> Iterator[Call]:
    """vLLM's own operators."""
    for data, x in _inputs(256):
        yield from _activations(data, x)
        yield from _masked(data, x)
        yield from _quantizers(data, x)
        yield from _sums(data, x)
    yield from _softmax()
    yield from _aligned()


def _activations(data: str, x: torch.Tensor) -> Iterator[Call]:
    half = torch.zeros(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    for operator in ("_C::silu_and_mul", "_C::gelu_and_mul", "_C::gelu_tanh_and_mul"):
        yield Call(operator, data, (half.clone(), x), (0,))
    yield Call("_C::relu_squared", data, (torch.zeros_like(x), x), (0,))
    for limit, alpha, beta in ((7.0, 1.0, 0.0), (7.0, 1.702, 1.0), (0.25, 1.0, 0.0)):
        yield Call(CLAMPED, f"{data} {limit} {alpha} {beta}", (half.clone(), x, limit, alpha, beta), (0,))
    yield Call(SWIGLUOAI, data, (half.clone(), x, 1.702, 7.0), (0,))
    for beta, linear in ((1.0, -1.0), (2.5, 7.0)):
        yield Call(SITU, f"{data} {beta} {linear}", (half.clone(), x, beta, linear), (0,))


def _masked(data: str, x: torch.Tensor) -> Iterator[Call]:
    """Experts of none, some, all and more than all of their rows."""
    rows = x[:5].repeat(4, 1).reshape(4, 5, -1)
    counts = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
    for activation in _MASKED_ACTIVATIONS:
        out = torch.zeros(4, 5, x.shape[1] if activation.endswith("_no_mul") else x.shape[1] // 2, dtype=x.dtype)
        parameters = _MASKED_PARAMETERS.get(activation, (0.75, 1.25, 0.5, 2.5, 7.0))
        yield Call(MASKED, f"{data} {activation}", (out, rows.clone(), counts, activation, *parameters), (0,))


def _quantizers(data: str, x: torch.Tensor) -> Iterator[Call]:
    fp8, int8 = torch.zeros(x.shape, dtype=FP8), torch.zeros(x.shape, dtype=torch.int8)
    for scale in (0.03125, 0.0371, 3.3):
        s = torch.tensor([scale])
        yield Call("_C::static_scaled_int8_quant", f"{data} s={scale}", (int8.clone(), x, s, None), (0,))
        yield Call("_C::static_scaled_fp8_quant", f"{data} s={scale}", (fp8.clone(), x, s), (0,))
    azp = torch.tensor([-7], dtype=torch.int32)
    yield Call("_C::static_scaled_int8_quant", f"{data} azp", (int8.clone(), x, torch.tensor([0.0371]), azp), (0,))
    tokens = torch.linspace(0.01, 1.7, x.shape[0])
    yield Call("_C::static_scaled_fp8_quant", f"{data} a scale a row", (fp8.clone(), x, tokens, [1, -1]), (0,))
    groups = torch.linspace(0.01, 1.7, x.shape[0] * 2).reshape(-1, 2)
    yield Call("_C::static_scaled_fp8_quant", f"{data} a scale a group", (fp8.clone(), x, groups), (0,))
    rows = torch.zeros(x.shape[0], 1)
    yield Call("_C::dynamic_scaled_int8_quant", data, (int8.clone(), x, rows.clone(), None), (0, 2))
    yield Call("_C::dynamic_scaled_fp8_quant", data, (fp8.clone(), x, torch.zeros(1)), (0, 2))
    for name, bound in (("", None), (" bounded", torch.tensor([0.75]))):
        yield Call("_C::dynamic_per_token_scaled_fp8_quant", f"{data}{name}", (fp8.clone(), x, rows.clone(), bound), (0, 2))
    scales, columns = torch.zeros(x.shape[0], 2), torch.zeros(2, x.shape[0]).t()
    for name, given, ue8m0, transposed in (("", scales, False, False), (" ue8m0", scales, True, False), (" columns", columns, False, True)):
        arguments = (x, fp8.clone(), given.clone(), 128, 1e-10, -448.0, 448.0, ue8m0, transposed, False)
        yield Call("_C::per_token_group_fp8_quant", f"{data}{name}", arguments, (1, 2))
    yield Call("_C::per_token_group_quant_int8", data, (x, int8.clone(), scales.clone(), 128, 1e-10, -128.0, 127.0), (1, 2))
    if x.dtype is not torch.float32:
        for group in (128, 64):
            half, given = torch.zeros(x.shape[0], 128, dtype=FP8), torch.zeros(x.shape[0], 128 // group)
            yield Call(FUSED, f"{data} groups of {group}", (half, x, given, group, None, False), (0, 2))


def _sums(data: str, x: torch.Tensor) -> Iterator[Call]:
    for slots in (2, 3, 5):
        parts = x[:, : slots * 32].reshape(x.shape[0], slots, 32).contiguous()
        yield Call("_moe_C::moe_sum", f"{data} k{slots}", (parts, torch.zeros(x.shape[0], 32, dtype=x.dtype)), (1,))


def _softmax() -> Iterator[Call]:
    for experts, top_k, renormalize in itertools.product((2, 3, 5, 8, 40, 60, 128, 192, 256), (1, 2), (True, False)):
        yield _routed(f"E{experts} k{top_k} renormalize={renormalize}", _random(torch.float32, 33, experts, experts), top_k, renormalize)
    for dtype in FLOATS:
        name = str(dtype).removeprefix("torch.")
        yield _routed(f"{name} E60 k4", _random(dtype, 33, 60, 7), 4, True)
        yield _routed(f"{name} ties", torch.zeros(5, 40, dtype=dtype), 5, True)
        yield _routed(f"{name} endless", torch.stack([_cycle(values, 8) for values in _ENDLESS_ROWS]).to(dtype), 2, True)


def _routed(data: str, logits: torch.Tensor, top_k: int, renormalize: bool) -> Call:
    ids = torch.zeros(logits.shape[0], top_k, dtype=torch.int32)
    arguments = (torch.zeros(logits.shape[0], top_k), ids.clone(), ids.clone(), logits, renormalize, None, None)
    return Call(SOFTMAX, data, arguments, (0, 1, 2))


def _aligned() -> Iterator[Call]:
    """Few tokens and many, experts few and many: the kernel has a way of its own for each. Ids that no expert has among them."""
    for tokens, top_k, experts, block in itertools.product((1, 7, 33, 1100), (1, 4), (4, 8, 60, 128, 300), (16, 64)):
        if top_k > experts:
            continue
        generator = torch.Generator().manual_seed(tokens * experts + block)
        ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int()
        longest = ids.numel() + experts * (block - 1)
        outputs = [torch.full((size,), -7, dtype=torch.int32) for size in (longest, -(-longest // block), 1)]
        local = torch.arange(experts, dtype=torch.int32).sub_(1)  # expert 0 is another machine's
        for name, expert_map in (("", None), (" mapped", local)):
            data = f"M{tokens} k{top_k} E{experts} block {block}{name}"
            yield Call(ALIGN, data, (ids, experts, block, *(each.clone() for each in outputs), expert_map), (3, 4, 5))


def humming() -> Iterator[Call]:
    """Humming's weight operators: every width, signed codes among them; N in whole tiles of 64, K in whole tiles of 512 / A."""
    for bits, columns in itertools.product(range(1, 9), (64, 96)):
        codes = _codes(bits, 3, 5, columns)
        words = torch.zeros(3, 5, columns * bits // 32, dtype=torch.int32)
        yield Call("humming::pack_weight", f"B{bits} K{columns}", (codes, words, bits), (1,))
        yield Call("humming::pack_weight", f"B{bits} K{columns} wider codes", (codes - (1 << bits), words.clone(), bits), (1,))
        yield Call("humming::unpack_weight", f"B{bits} K{columns}", (ops_humming.packed(codes, bits), torch.zeros_like(codes), bits), (1,))
    widths = ((8, 16), (4, 16), (2, 16), (8, 8), (4, 8), (2, 8), (4, 4))
    for (bits, activation_bits), columns, rows in itertools.product(widths, (64, 96, 128, 192), (64, 192)):
        if columns % (512 // activation_bits) == 0:
            yield from _repacked(bits, activation_bits, columns, rows)


def _repacked(bits: int, activation_bits: int, columns: int, rows: int) -> Iterator[Call]:
    codes = _codes(bits, 2, rows, columns)
    packed = ops_humming.packed(codes, bits)
    empty = torch.zeros(2, columns * activation_bits // 256, rows * bits * 8 // activation_bits, dtype=torch.int32)
    ways = {f"mode {mode}": (packed, False, mode, False) for mode in range(4)}
    ways |= {"codes": (codes, False, 3, False), "int2fp": (packed, True, 3, False), "native": (packed, False, 3, True)}
    for name, (given, int2fp, mode, native) in ways.items():
        words = given is packed
        arguments = (given, empty.clone(), bits, activation_bits, words, int2fp, False, False, mode, 0, None, None, None, False, native)
        yield Call("humming::repack_weight", f"B{bits} A{activation_bits} K{columns} N{rows} {name}", arguments, (1,))


def _codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(bits), dtype=torch.int32)


GROUPS = {"vllm": compiled, "humming": humming}
