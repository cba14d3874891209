"""Are the interpreter lane's stand-ins the compiled operators? Both are called on the same bytes; needs a GPU.

``python -m harness.subject.fidelity [FILE]`` prints what differs, and writes one JSON line per (operator, data) to FILE: elements that
differ in their bits, the largest difference in steps of the output format, and how many of either side lie outside what the references
allow the operator. The claim: identical bits; or, for operators that call expf, erff or tanhf, which are not the C library's, both inside
the interval that references/bounds.py derives from those functions' published errors.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from harness.subject.interpreter import ops_activation, ops_humming, ops_moe, ops_quant
from references.bounds import Interval, activation_interval, exactly, quantize, router_weights, store, times
from references.routing import route
from references.vocabulary import Activation, ActQuant, Format, Layout, Quotient

IMPLEMENTATIONS = {**ops_moe.IMPLEMENTATIONS, **ops_activation.IMPLEMENTATIONS, **ops_quant.IMPLEMENTATIONS, **ops_humming.IMPLEMENTATIONS}
FP8 = torch.float8_e4m3fn
SPECIAL = (0.0, -0.0, 1e-30, -1e-30, 5.96e-8, 6.1e-5, 0.5, -0.5, 1.5, 2.5, -2.5, 126.5, 127.5, 448.0, 464.0, 480.0, -480.0, 65504.0)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = {torch.bfloat16: Format.BF16, torch.float16: Format.FP16, torch.float32: Format.FP32}
GATED = {
    "_C::silu_and_mul": Activation.SILU,
    "_C::gelu_and_mul": Activation.GELU,
    "_C::gelu_tanh_and_mul": Activation.GELU_TANH,
}
FUSED = "_C::silu_and_mul_per_block_quant"
FUSED_QUANTIZER = ActQuant(
    format=Format.E4M3FN, layout=Layout.GROUP128, dynamic=True, scale_floor=1.0 / (448.0 * 512.0), quotient=Quotient.DIVIDE
)
SOFTMAX = "_moe_C::topk_softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """One comparison. steps: largest distance in representable values of the output; error: one side raised, its text; outside: elements
    of either side that the references do not allow, None where the operator must be identical."""

    operator: str
    data: str
    elements: int
    differing: int
    steps: int
    outside: int | None = None
    error: str = ""

    @property
    def as_declared(self) -> bool:
        """Identical, or an operator whose function may differ, and inside its interval on both sides."""
        return not self.error and (self.differing == 0 or self.outside == 0)


def _allowed(operator: str, arguments: tuple[object, ...]) -> tuple[Interval, ...] | None:
    """What the references allow each output that is compared; None: only the same bits."""
    if operator == SOFTMAX:
        logits, top_k, renormalize = arguments[3], arguments[0], arguments[4]
        assert isinstance(logits, torch.Tensor)
        assert isinstance(top_k, torch.Tensor)
        routing = route(logits, top_k.shape[1], bool(renormalize))
        return router_weights(routing.topk_weights, logits.shape[1], False), exactly(routing.topk_ids.double())
    if operator not in GATED and operator != FUSED:
        return None
    x = arguments[1]
    assert isinstance(x, torch.Tensor)
    gate, up = (exactly(half) for half in x.double().chunk(2, -1))
    act = activation_interval(GATED.get(operator, Activation.SILU), gate)
    if operator in GATED:
        return (store(store(times(store(act, FORMATS[x.dtype]), up), Format.FP32), FORMATS[x.dtype]),)
    return quantize(store(times(store(act, Format.FP32), up), Format.FP32), FUSED_QUANTIZER, None)


def _outside(allowed: Interval, values: torch.Tensor) -> int:
    inside = (allowed.low <= values.double()) & (values.double() <= allowed.high)
    return int((~inside & torch.isfinite(allowed.low) & torch.isfinite(allowed.high)).sum())


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Bits as integers in the order of the values (sign-magnitude to two's complement)."""
    if not x.is_floating_point():
        return x.long()
    view = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    bits = x.view(view).long()
    return torch.where(bits < 0, -(bits & ~(-1 << (8 * x.element_size() - 1))), bits)


def _random(dtype: torch.dtype, rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ramp = 2.0 ** torch.linspace(-8, 6, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * ramp).to(dtype)


def _special(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    values = torch.tensor(SPECIAL)
    return values[torch.arange(rows * columns) % len(SPECIAL)].reshape(rows, columns).to(dtype)


def _inputs(columns: int) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in FLOATS:
        name = str(dtype).removeprefix("torch.")
        yield f"{name} random", _random(dtype, 37, columns, 1)
        yield f"{name} special", _special(dtype, 5, columns)


def _calls() -> Iterator[tuple[str, str, tuple[object, ...], tuple[int, ...]]]:
    """(operator, data, arguments on the CPU, positions of outputs)."""
    for data, x in _inputs(256):
        for operator in ("_C::silu_and_mul", "_C::gelu_and_mul", "_C::gelu_tanh_and_mul"):
            yield operator, data, (torch.zeros(x.shape[0], 128, dtype=x.dtype), x), (0,)
        quantized = torch.zeros(x.shape, dtype=FP8), torch.zeros(x.shape, dtype=torch.int8)
        for scale in (0.03125, 0.0371, 3.3):
            s = torch.tensor([scale])
            yield "_C::static_scaled_int8_quant", f"{data} s={scale}", (quantized[1].clone(), x, s, None), (0,)
            yield "_C::static_scaled_fp8_quant", f"{data} s={scale}", (quantized[0].clone(), x, s), (0,)
        rows = torch.zeros(x.shape[0], 1)
        yield "_C::dynamic_scaled_int8_quant", data, (quantized[1].clone(), x, rows.clone(), None), (0, 2)
        yield "_C::dynamic_scaled_fp8_quant", data, (quantized[0].clone(), x, torch.zeros(1)), (0, 2)
        yield "_C::dynamic_per_token_scaled_fp8_quant", data, (quantized[0].clone(), x, rows.clone(), None), (0, 2)
        groups = torch.zeros(x.shape[0], 2)
        fp8 = (x, quantized[0].clone(), groups.clone(), 128, 1e-10, -448.0, 448.0, False, False, False)
        yield "_C::per_token_group_fp8_quant", data, fp8, (1, 2)
        yield "_C::per_token_group_quant_int8", data, (x, quantized[1].clone(), groups.clone(), 128, 1e-10, -128.0, 127.0), (1, 2)
        if x.dtype is not torch.float32:
            half = torch.zeros(x.shape[0], 128, dtype=FP8), x, torch.zeros(x.shape[0], 1), 128, None, False
            yield "_C::silu_and_mul_per_block_quant", data, half, (0, 2)
        yield "_moe_C::moe_sum", data, (x.reshape(x.shape[0], 2, 128), torch.zeros(x.shape[0], 128, dtype=x.dtype)), (1,)
    for experts, top_k, renormalize in itertools.product((2, 3, 5, 8, 40, 60, 128), (1, 2), (True, False)):
        logits = _random(torch.float32, 33, experts, experts)
        ints = torch.zeros(33, top_k, dtype=torch.int32)
        arguments = (torch.zeros(33, top_k), ints.clone(), ints.clone(), logits, renormalize, None, None)
        yield "_moe_C::topk_softmax", f"E{experts} k{top_k} renormalize={renormalize}", arguments, (0, 1)


def _humming_calls() -> Iterator[tuple[str, str, tuple[object, ...], tuple[int, ...]]]:
    """As ``_calls``: every width, signed codes among them, columns that are no multiple of a tile."""
    for bits, activation_bits, columns in ((8, 16, 64), (8, 16, 96), (4, 16, 192), (2, 16, 128), (8, 8, 192), (4, 8, 96), (4, 4, 128)):
        codes = torch.randint(0, 1 << bits, (2, 128, columns), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
        words = torch.zeros(2, 128, columns * bits // 32, dtype=torch.int32)
        data = f"B{bits} A{activation_bits} K{columns}"
        yield "humming::pack_weight", data, (codes, words.clone(), bits), (1,)
        packed = ops_humming.packed(codes, bits)
        yield "humming::unpack_weight", data, (packed, torch.zeros_like(codes), bits), (1,)
        repacked = torch.zeros(2, columns * activation_bits // 256, 128 * bits * 8 // activation_bits, dtype=torch.int32)
        yield "humming::repack_weight", data, (packed, repacked.clone(), bits, activation_bits, True), (1,)
        yield "humming::repack_weight", f"{data} int2fp", (packed, repacked.clone(), bits, activation_bits, True, True), (1,)
        native = (packed, repacked.clone(), bits, activation_bits, True, False, False, False, 3, 0, None, None, None, False, True)
        yield "humming::repack_weight", f"{data} native", native, (1,)


def _device(argument: object, device: str) -> object:
    return argument.to(device, copy=True) if isinstance(argument, torch.Tensor) else argument


def _compiled(operator: str) -> Callable[..., object]:
    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name)  # type: ignore[no-any-return]


def measure() -> Iterator[Fidelity]:
    """Every operator over every data set. An operator that raises is reported, not hidden; one that ends the CUDA context is the last."""
    for operator, data, arguments, outputs in itertools.chain(_calls(), _humming_calls() if "humming" in sys.modules else ()):
        here = tuple(_device(a, "cpu") for a in arguments)
        there = tuple(_device(a, "cuda") for a in arguments)
        texts = []
        for call, given in ((IMPLEMENTATIONS[operator], here), (_compiled(operator), there)):
            try:
                call(*given)
                torch.accelerator.synchronize()  # an assertion in the kernel is heard here, and ends the context
            except RuntimeError as error:
                texts.append(f"{'stand-in' if given is here else 'compiled'}: {str(error).splitlines()[0]}")
        differing = elements = steps = 0
        allowed = None if texts else _allowed(operator, arguments)
        outside = None if allowed is None else 0
        for number, position in enumerate(outputs if not texts else ()):
            ours, theirs = here[position], there[position]
            assert isinstance(ours, torch.Tensor)
            assert isinstance(theirs, torch.Tensor)
            gap = (_ordered(ours) - _ordered(theirs.cpu())).abs()
            both_nan = torch.isnan(ours.float()) & torch.isnan(theirs.cpu().float())
            gap = gap.masked_fill(both_nan, 0)
            if allowed is not None and outside is not None:
                outside += sum(_outside(allowed[number], side.cpu()) for side in (ours, theirs))
            differing, elements, steps = differing + int((gap > 0).sum()), elements + gap.numel(), max(steps, int(gap.max()))
        yield Fidelity(
            operator=operator, data=data, elements=elements, differing=differing, steps=steps, outside=outside, error="; ".join(texts)
        )
        if any("CUDA error" in text for text in texts):
            return  # nothing after it can run in this process


def main() -> int:
    """Print what differs and write one JSON line per comparison to the file named by the first argument, if any."""
    if importlib.util.find_spec("humming") is not None:
        importlib.import_module("humming.ops")  # registers its operators
    import vllm._C_stable_libtorch
    import vllm._moe_C_stable_libtorch  # noqa: F401

    results = list(measure())
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(r)) + "\n" for r in results)
    for result in results:
        if result.differing or result.error:
            verdict = "allowed" if result.as_declared else "NOT ALLOWED"
            count = f"{result.differing:6d}/{result.elements:<6d} steps {result.steps} outside {result.outside}"
            line = f"{result.operator:40s} {result.data:28s} {count} {verdict}"
            sys.stdout.write(f"{line} {result.error}\n")
    bad = sum(not r.as_declared for r in results)
    sys.stdout.write(f"{len(results)} comparisons, {len(results) - bad} as claimed, {bad} not\n")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
