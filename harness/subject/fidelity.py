"""Are the interpreter lane's stand-ins the compiled operators? Both are called on the same bytes; needs a GPU.

``python -m harness.subject.fidelity [FILE]`` prints what differs, and writes one JSON line per (operator, data) to FILE: elements that
differ in their bits, the largest difference in steps of the output format, and how many of either side lie outside what the references
allow the operator. The claim: identical bits, any NaN for any other; or, for operators that call expf, erff or tanhf, which are not the C
library's, both inside the interval that references/bounds.py derives from those functions' published errors.

Exit codes: 0, every comparison is as claimed; 1, one is not; 2, misuse, vLLM missing, or a comparison that could not be made; 125, no GPU.

Operators are called in processes of their own: an assertion in a kernel ends a CUDA context, and the next process goes on behind it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.exits import Misuse, Unavailable
from harness.program import Parser, ended, writing
from harness.subject import SubjectUnavailable
from harness.subject import fidelity_calls as calls
from harness.subject.interpreter import compiled_ops
from references.bounds import Interval, activation_interval, exactly, quantize, router_weights, store, times
from references.gating import gated_interval
from references.routing import route
from references.vocabulary import Activation, ActQuant, Format, Layout, Quotient, Swiglu

if TYPE_CHECKING:
    from harness.subject.fidelity_calls import Call

FORMATS = {torch.bfloat16: Format.BF16, torch.float16: Format.FP16, torch.float32: Format.FP32}
GATED = {
    "_C::silu_and_mul": Activation.SILU,
    "_C::gelu_and_mul": Activation.GELU,
    "_C::gelu_tanh_and_mul": Activation.GELU_TANH,
}
PROCESSES = {"vllm": 1, "humming": 2}  # Humming compiles a kernel for every width
MODULES = {"vllm": ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"), "humming": ("humming.ops",)}  # register the operators
_CHILD = "from harness.subject.fidelity import child; child({!r}, {}, {}, {})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """One comparison. steps: largest distance in representable values of the output; outside: elements that are not the same bits, and of
    which either side is not allowed by the references; first: where the sides differ first, and how; error: what one side raised."""

    operator: str
    data: str
    elements: int = 0
    differing: int = 0
    steps: int = 0
    outside: int = 0
    first: str = ""
    error: str = ""
    lost: bool = False  # the CUDA context, by this call

    @property
    def as_declared(self) -> bool:
        """Identical, or an operator whose function may differ, and inside its interval on both sides."""
        return not self.error and not self.outside


def _allowed(operator: str, arguments: tuple[object, ...]) -> tuple[Interval, ...] | None:
    """What the references allow each output that is compared; None: only the same bits."""
    if operator == calls.SOFTMAX:
        logits, top_k, renormalize = arguments[3], arguments[0], arguments[4]
        assert isinstance(logits, torch.Tensor)
        assert isinstance(top_k, torch.Tensor)
        if not bool(logits.isfinite().all()):
            return None
        routing = route(logits, top_k.shape[1], bool(renormalize))
        slots = torch.arange(top_k.shape[1]) * len(logits) + torch.arange(len(logits))[:, None]
        weights = router_weights(routing.topk_weights, logits.shape[1], False)
        return weights, exactly(routing.topk_ids.double()), exactly(slots.double())
    if operator == calls.MASKED:
        return (_masked(arguments),)
    if operator not in (*GATED, calls.FUSED, calls.CLAMPED, calls.SWIGLUOAI, calls.SITU):
        return None
    x = arguments[1]
    assert isinstance(x, torch.Tensor)
    halves = (x[..., ::2], x[..., 1::2]) if operator == calls.SWIGLUOAI else x.chunk(2, -1)
    stored = FORMATS[x.dtype]
    if operator in (calls.CLAMPED, calls.SWIGLUOAI):  # fminf of NaN and the limit is the limit
        limit = float(arguments[2]) if operator == calls.CLAMPED else 7.0  # type: ignore[arg-type]
        halves = tuple(half.nan_to_num(nan=limit, posinf=torch.inf, neginf=-torch.inf) for half in halves)
    gate, up = (exactly(half.double()) for half in halves)
    match operator:
        case calls.CLAMPED:
            limit, alpha, beta = map(float, arguments[2:5])  # type: ignore[arg-type]
            how, swiglu = Activation.SWIGLUOAI_UNINTERLEAVE, Swiglu(limit=limit, alpha=alpha, beta=beta)
            return (store(gated_interval(how, swiglu, gate, up, stored), stored),)
        case calls.SWIGLUOAI:
            swiglu = Swiglu(limit=7.0, alpha=1.702, beta=1.0)
            return (store(gated_interval(Activation.SWIGLUOAI, swiglu, gate, up, None), stored),)
        case calls.SITU:
            soft, linear = map(float, arguments[2:4])  # type: ignore[arg-type]
            swiglu = Swiglu(situ=soft, linear=linear if linear > 0 else None)
            return (store(gated_interval(Activation.SITU, swiglu, gate, up, None), stored),)
    act = activation_interval(GATED.get(operator, Activation.SILU), gate)
    if operator in GATED:
        return (store(store(times(store(act, stored), up), Format.FP32), stored),)
    layout = Layout.GROUP128 if arguments[3] == 128 else Layout.GROUP64
    how = ActQuant(format=Format.E4M3FN, layout=layout, dynamic=True, scale_floor=1.0 / (448.0 * 512.0), quotient=Quotient.DIVIDE)
    product = store(times(store(act, Format.FP32), up), Format.FP32)
    nan = product.low.isnan() | product.high.isnan()  # which the scale passes over; the codes of NaN are not allowed to differ
    codes, scales = quantize(Interval(product.low.masked_fill(nan, 0.0), product.high.masked_fill(nan, 0.0)), how, None)
    return Interval(codes.low.masked_fill(nan, torch.nan), codes.high.masked_fill(nan, torch.nan)), scales


def _masked(arguments: tuple[object, ...]) -> Interval:
    """What the operator for whole tensors may give on the rows that are counted; the others stay as they are."""
    out, x, counts, activation = arguments[:4]
    limit, alpha, beta, soft, linear = map(float, arguments[4:9])  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert isinstance(x, torch.Tensor)
    assert isinstance(counts, torch.Tensor)
    stored = FORMATS[x.dtype]
    parameters: dict[str, tuple[str, tuple[float, ...]]] = {
        "silu_with_clamp": (calls.CLAMPED, (limit, alpha, beta)),
        "swigluoai_uninterleave": (calls.CLAMPED, (limit, alpha, beta)),
        "swigluoai": (calls.SWIGLUOAI, ()),
        "situ": (calls.SITU, (soft, linear)),
    }
    if str(activation).endswith("_no_mul"):
        allowed = store(activation_interval(Activation(str(activation)), exactly(x.double())), stored)
    elif activation == "swiglustep":
        gate, up = (exactly(half.double()) for half in x.chunk(2, -1))
        allowed = store(gated_interval(Activation.SWIGLUSTEP, Swiglu(limit=limit), gate, up, None), stored)
    else:
        whole, numbers = parameters.get(str(activation), (f"_C::{activation}_and_mul", ()))
        (allowed,) = _allowed(whole, (out, x, *numbers)) or ()
    read = (torch.arange(x.shape[1]) < counts[:, None])[..., None]
    kept = out.double()
    return Interval(torch.where(read, allowed.low, kept), torch.where(read, allowed.high, kept))


def _inside(allowed: Interval, values: torch.Tensor) -> torch.Tensor:
    return (allowed.low <= values.double()) & (values.double() <= allowed.high)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """As integers."""
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).long()


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, by their bits (sign-magnitude to two's complement); both zeros are 0."""
    bits = _bits(x)
    if not x.is_floating_point():
        return bits
    return torch.where(bits < 0, -(bits & ~(-1 << (8 * x.element_size() - 1))), bits)


def _in_any_order(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Aligned rows: an expert's may stand in any order among themselves, since each is multiplied by itself."""
    block, rows, experts = arguments[2], arguments[3], arguments[4]
    assert isinstance(block, int)
    assert isinstance(rows, torch.Tensor)
    assert isinstance(experts, torch.Tensor)
    rows, start = rows.cpu().clone(), 0
    for expert, blocks in itertools.groupby(experts.tolist()):
        end = start + block * len(list(blocks))
        if expert >= 0:
            rows[start:end] = rows[start:end].sort().values
        start = end
    return (*arguments[:3], rows, *arguments[4:])


def _device(argument: object, device: str) -> object:
    return argument.to(device, copy=True) if isinstance(argument, torch.Tensor) else argument


def _compiled(operator: str) -> Callable[..., object]:
    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name)  # type: ignore[no-any-return]


def _called(call: Callable[..., object], arguments: tuple[object, ...], side: str) -> str:
    """What it raised, or nothing."""
    try:
        call(*arguments)
        torch.cuda.synchronize()  # an assertion in the kernel is heard here
    except (RuntimeError, AssertionError, AttributeError) as error:  # told in the result, which then does not hold
        return f"{side}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def measured(call: Call) -> Fidelity:
    """Both sides called with ``call``, and compared. What raises is reported, not hidden."""
    operator, data, arguments, _ = call
    here = tuple(_device(a, "cpu") for a in arguments)
    there = tuple(_device(a, "cuda") for a in arguments)
    raised = [
        _called(compiled_ops.IMPLEMENTATIONS[operator], here, "stand-in"),
        _called(lambda *a: _compiled(operator)(*a), there, "compiled"),
    ]
    if any(raised):
        return Fidelity(operator=operator, data=data, error="; ".join(filter(None, raised)), lost=_lost())
    if operator == calls.ALIGN:
        here, there = _in_any_order(here), _in_any_order(there)
    return compared(call, here, there)


def compared(call: Call, here: tuple[object, ...], there: tuple[object, ...]) -> Fidelity:
    """The outputs among both sides' arguments, after the call."""
    operator, data, arguments, outputs = call
    allowed = _allowed(operator, arguments)
    elements = differing = steps = outside = 0
    first = ""
    for number, position in enumerate(outputs):
        ours, theirs = here[position], there[position]
        assert isinstance(ours, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        theirs = theirs.cpu()
        neither = torch.isnan(ours.float()) & torch.isnan(theirs.float())
        gap = (_ordered(ours) - _ordered(theirs)).abs().masked_fill(neither, 0)
        wrong = (_bits(ours) != _bits(theirs)) & ~neither  # zeros of both signs are no step apart
        elements, differing, steps = elements + gap.numel(), differing + int(wrong.sum()), max(steps, int(gap.max()))
        if allowed is not None:
            wrong &= ~(_inside(allowed[number], ours) & _inside(allowed[number], theirs))
        outside += int(wrong.sum())
        if not first and bool(wrong.any()):
            where = tuple(int(i) for i in wrong.nonzero()[0])
            first = f"output {number} {list(where)}: stand-in {ours[where].item()}, compiled {theirs[where].item()}"
    return Fidelity(operator=operator, data=data, elements=elements, differing=differing, steps=steps, outside=outside, first=first)


def child(group: str, part: int, parts: int, start: int) -> None:
    """Compare every ``parts``-th call of a group from ``part`` on, the first ``start`` of them left out: a JSON line each, to the end or to
    the call that ends the context."""
    for name in MODULES[group]:
        importlib.import_module(name)
    for call in itertools.islice(calls.GROUPS[group](), part + start * parts, None, parts):
        found = measured(call)
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.flush()
        if found.lost:
            return


def _all_of(group: str, part: int, parts: int, found: Callable[[Fidelity], None]) -> None:
    """Tells each comparison as it is made. Raises SubjectUnavailable when a process ends without the comparison it was at."""
    start, lost = 0, True
    while lost:
        command = [sys.executable, "-c", _CHILD.format(group, part, parts, start)]
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            lost = False
            for line in process.stdout:
                if line.startswith("{"):
                    told = Fidelity(**json.loads(line))
                    start, lost = start + 1, told.lost
                    found(told)
            if process.wait() and not lost:  # a lost context may also end the interpreter with an error
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
                raise SubjectUnavailable(f"comparing operators of {group} ended with exit code {process.returncode} after {start}: {last}")


def installed() -> list[str]:
    """The groups of which there are operators here. Raises Unavailable without a GPU, Misuse without vLLM."""
    groups = [group for group, (module, *_) in MODULES.items() if importlib.util.find_spec(module.partition(".")[0]) is not None]
    if "vllm" not in groups:
        raise Misuse("vllm is not installed in this environment: install vllm, or run this in an environment that `tox run -e triton` made")
    if not torch.cuda.is_available():
        raise Unavailable("the compiled operators need an NVIDIA GPU and torch finds none; run this on a machine that has one")
    return groups


def measure(groups: Sequence[str], found: Callable[[Fidelity], None]) -> None:
    """Every operator of the groups over every data set. Raises SubjectUnavailable as ``_all_of`` does."""
    jobs = [(group, part, PROCESSES[group]) for group in groups for part in range(PROCESSES[group])]
    with ThreadPoolExecutor(len(jobs)) as processes:
        for done in [processes.submit(_all_of, *job, found) for job in jobs]:
            done.result()


def _file(arguments: Sequence[str]) -> Path:
    """Raises Misuse."""
    described = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m harness.subject.fidelity", description=__doc__, formatter_class=described)
    parser.add_argument(
        "file", metavar="FILE", nargs="?", type=Path, default=os.devnull, help="for one JSON line per comparison; default: none"
    )
    return Path(parser.parse_args(arguments).file)


def _run(arguments: Sequence[str]) -> int:
    """Print what differs and write one JSON line per comparison, as it is made."""
    path, groups, results = _file(arguments), installed(), list[Fidelity]()
    with writing(path):
        file = path.open("w", encoding="utf-8")

    def found(result: Fidelity) -> None:
        results.append(result)
        with writing(path):
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()

    with file:
        measure(groups, found)
    for result in results:
        if result.differing or result.error:
            verdict = "allowed" if result.as_declared else "NOT ALLOWED"
            count = f"{result.differing:6d}/{result.elements:<6d} steps {result.steps} outside {result.outside}"
            sys.stdout.write(f"{result.operator:40s} {result.data:32s} {count} {verdict} {result.error}{result.first}\n")
    bad = sum(not r.as_declared for r in results)
    left_out = "".join(f"; {group} is not installed, its operators were not compared" for group in MODULES if group not in groups)
    sys.stdout.write(f"{len(results)} comparisons, {len(results) - bad} as claimed, {bad} not{left_out}\n")
    return int(bad > 0)


def main(arguments: Sequence[str]) -> int:
    """One of the exit codes above."""
    return ended("fidelity", lambda: _run(arguments))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
