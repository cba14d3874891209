"""Whether a fault explains all of an output: it lies in the interval of the layer that has the fault, and no gain over that is flagged.

The interval is the reference's own, of the faulty inputs: what is inside holds no second fault that could be shown of an honest layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from harness.compare import compare
from harness.faults import Fault
from harness.gains import gains
from harness.inject import Inputs, changed
from harness.inject_router import twice_on_input, twice_on_output
from harness.verdict import FaultFit, Outcome
from references.answer import answer_of
from references.loading import Matrix

EXPLAINS = 1.0 / 16.0  # a fault that leaves more of the deviation is not taken for its cause
NEAR = 0.75  # a fault that takes away a quarter of the deviation is named as the nearest
_CONTRIBUTED = "it changes what was contributed, and no step of the recipe"
_HIDDEN = "the hidden states stand for scaled ones: no kernel rounds as they are rounded"
_ORDER = "in which order, and rounded how often, is not said"
NO_INTERVAL: dict[Fault, str] = {
    Fault.ZERO_OUTPUT: _CONTRIBUTED,
    Fault.LAST_EXPERT_DROPPED: _CONTRIBUTED,
    Fault.TOPK_SLOT_DROPPED: _CONTRIBUTED,
    Fault.STALE_ROW: _CONTRIBUTED,
    Fault.TAIL_COLUMNS_DROPPED: _CONTRIBUTED,
    Fault.EXPERT_GAIN_1_008: _CONTRIBUTED,
    Fault.CHANNEL_GAIN_1_05: _CONTRIBUTED,
    Fault.A1_SCALE_NOT_APPLIED: _HIDDEN,
    Fault.A1_SCALE_APPLIED_TWICE: _HIDDEN,
    Fault.A_SCALE_OF_TOKEN_ZERO: _HIDDEN,
    Fault.A2_SCALE_NOT_APPLIED: "the scale is divided out of the weight's",
    Fault.A2_SCALE_APPLIED_TWICE: _ORDER,
    Fault.W13_SCALE_APPLIED_TWICE: _ORDER,
    Fault.W2_SCALE_APPLIED_TWICE: _ORDER,
    Fault.W13_INVERSE_SCALE: "a kernel divides, or multiplies by a rounded reciprocal",
    Fault.W2_INVERSE_SCALE: "a kernel divides, or multiplies by a rounded reciprocal",
    Fault.BIAS_SCALED: _ORDER,
    Fault.UP_PLUS_ONE: "the one is added with the bias, before anything that a kernel does to up",
    Fault.ACTIVATIONS_NOT_QUANTIZED: "how rows that are not quantized are multiplied and added is not said",
    Fault.ROUTER_WEIGHT_TWICE: "where, and in which format, no lane says; harness/inject_router.py has those that do",
    Fault.ROUTER_WEIGHT_TWICE_ON_INPUT: "where, and in which format, no lane says; harness/inject_router.py has those that do",
}
_UNLESS: dict[Fault, Callable[[Inputs], bool]] = {
    Fault.ROUTER_WEIGHT_TWICE: lambda inputs: twice_on_output(inputs) is not inputs,
    Fault.ROUTER_WEIGHT_TWICE_ON_INPUT: lambda inputs: twice_on_input(inputs) is not inputs,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a fault does not explain: elements outside its interval, of how many; groups of them whose gain over it is flagged."""

    elements: int
    of: int
    groups: int

    def __bool__(self) -> bool:
        return self.elements + self.groups > 0


def no_interval(fault: Fault, inputs: Inputs) -> str | None:
    """Why nothing can be derived of a layer that has ``fault``; None where its interval is the reference's."""
    return None if of_the_lane(fault, inputs) else NO_INTERVAL.get(fault)


def of_the_lane(fault: Fault, inputs: Inputs) -> bool:
    """Whether the lane is known to have ``fault``, wherever it can: also where it is too small to have to be caught."""
    return fault in _UNLESS and _UNLESS[fault](inputs)


def has_interval(fit: FaultFit, inputs: Inputs) -> bool:
    """Whether all faults of ``fit`` have one."""
    return all(no_interval(fault, inputs) is None for fault in _faults(fit))


def left(fit: FaultFit, inputs: Inputs, actual: torch.Tensor) -> Left:
    """Of ``actual`` [M, H]. Raises ReferenceDisagreesWithItself."""
    faulty = with_faults(fit, inputs)
    answer = answer_of(faulty.loaded, faulty.hidden_states, faulty.routing, faulty.activation, faulty.recipe)
    comparison = compare(answer, actual)
    outside = 0 if comparison.outcome is Outcome.PASS else int(comparison.bad.sum())
    return Left(elements=outside, of=actual.numel(), groups=len(gains(answer, actual, len(inputs.loaded)).flagged()))


def with_faults(fit: FaultFit, inputs: Inputs) -> Inputs:
    """The layer that has the faults of ``fit``, which have intervals, on the experts that it grants them to."""
    faulty = inputs
    for fault in _faults(fit):
        faulty = changed(fault, faulty)
    if not fit.experts:
        return faulty
    both = zip(inputs.loaded, faulty.loaded, strict=True)
    loaded = [wrong if e in fit.experts else right for e, (right, wrong) in enumerate(both)]
    return replace(faulty, loaded=tuple(replace(e, w13=_with_bias(e.w13, inputs), w2=_with_bias(e.w2, inputs)) for e in loaded))


def _with_bias(matrix: Matrix, inputs: Inputs) -> Matrix:
    """A zero where another expert has a bias: adding it rounds nothing."""
    if matrix.bias is not None or all(expert.w2.bias is None for expert in inputs.loaded):
        return matrix
    return replace(matrix, bias=matrix.codes.new_zeros(matrix.codes.shape[0]))


def explanation(fits: Iterable[FaultFit], inputs: Inputs, actual: torch.Tensor) -> FaultFit | None:
    """The first of ``fits``, the best first, that explains all. Those without an interval do when they leave at most ``EXPLAINS``, and no
    other does that: it may be the other, with a second fault.

    Those that leave more are asked last: roundings may be as large as a fault, which then leaves much and explains all the same.
    """
    every = tuple(fits)
    close = tuple(each for each in every if each.residual <= EXPLAINS)
    far = tuple(each for each in every if EXPLAINS < each.residual < 1.0)
    whole = _first(close, inputs, actual)
    if whole is None and close and not any(has_interval(each, inputs) for each in close):
        return close[0]
    return whole or _first(far, inputs, actual)


def _first(fits: Iterable[FaultFit], inputs: Inputs, actual: torch.Tensor) -> FaultFit | None:
    return next((each for each in fits if has_interval(each, inputs) and not left(each, inputs, actual)), None)


def _faults(fit: FaultFit) -> tuple[Fault, ...]:
    return tuple(Fault[name] for name in fit.fault.split("+"))
