"""Are the interpreter lane's stand-ins the compiled operators? Both are called on the same bytes; needs a GPU.

``python -m harness.subject.fidelity`` prints one line per (operator, dtype, data): elements that differ in their bits, and
the largest difference in steps of the output format. 0 everywhere is the claim; DECLARED names what differs, and by how much.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from harness.subject.interpreter import ops_activation, ops_moe, ops_quant

IMPLEMENTATIONS = {**ops_moe.IMPLEMENTATIONS, **ops_activation.IMPLEMENTATIONS, **ops_quant.IMPLEMENTATIONS}
FP8 = torch.float8_e4m3fn
SPECIAL = (0.0, -0.0, 1e-30, -1e-30, 5.96e-8, 6.1e-5, 0.5, -0.5, 1.5, 2.5, -2.5, 126.5, 127.5, 448.0, 464.0, 480.0, -480.0, 65504.0)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# CUDA's expf, erff and tanhf are not the C library's: <= 2 ulp in float32 (CUDA C Programming Guide, mathematical functions),
# which reaches the output as at most one step where a rounding straddles.
DECLARED = {
    "_C::silu_and_mul": 2,
    "_C::gelu_and_mul": 2,
    "_C::gelu_tanh_and_mul": 2,
    "_C::silu_and_mul_per_block_quant": 1,
    "_moe_C::topk_softmax": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """One comparison. steps: largest distance in representable values of the output; error: one side raised, its text."""

    operator: str
    data: str
    elements: int
    differing: int
    steps: int
    error: str = ""

    @property
    def as_declared(self) -> bool:
        """Identical, or within the declared number of steps."""
        return not self.error and self.steps <= DECLARED.get(self.operator, 0)


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


def _device(argument: object, device: str) -> object:
    return argument.to(device, copy=True) if isinstance(argument, torch.Tensor) else argument


def _compiled(operator: str) -> Callable[..., object]:
    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name)  # type: ignore[no-any-return]


def measure() -> Iterator[Fidelity]:
    """Every operator over every data set. An operator that raises is reported, not hidden."""
    for operator, data, arguments, outputs in _calls():
        here = tuple(_device(a, "cpu") for a in arguments)
        there = tuple(_device(a, "cuda") for a in arguments)
        texts = []
        for call, given in ((IMPLEMENTATIONS[operator], here), (_compiled(operator), there)):
            try:
                call(*given)
            except RuntimeError as error:
                texts.append(f"{'stand-in' if given is here else 'compiled'}: {str(error).splitlines()[0]}")
        differing = elements = steps = 0
        for position in outputs if not texts else ():
            ours, theirs = here[position], there[position]
            assert isinstance(ours, torch.Tensor)
            assert isinstance(theirs, torch.Tensor)
            gap = (_ordered(ours) - _ordered(theirs.cpu())).abs()
            both_nan = torch.isnan(ours.float()) & torch.isnan(theirs.cpu().float())
            gap = gap.masked_fill(both_nan, 0)
            differing, elements, steps = differing + int((gap > 0).sum()), elements + gap.numel(), max(steps, int(gap.max()))
        yield Fidelity(operator=operator, data=data, elements=elements, differing=differing, steps=steps, error="; ".join(texts))


def main() -> int:
    """Print what differs and write one JSON line per comparison to the file named by the first argument, if any."""
    import vllm._C_stable_libtorch
    import vllm._moe_C_stable_libtorch  # noqa: F401

    results = list(measure())
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(r)) + "\n" for r in results)
    for result in results:
        if result.differing or result.error:
            verdict = "as declared" if result.as_declared else "NOT DECLARED"
            line = f"{result.operator:40s} {result.data:28s} {result.differing:6d}/{result.elements:<6d} steps {result.steps:4d} {verdict}"
            sys.stdout.write(f"{line} {result.error}\n")
    bad = sum(not r.as_declared for r in results)
    sys.stdout.write(f"{len(results)} comparisons, {len(results) - bad} as declared, {bad} not\n")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
