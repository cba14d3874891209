"""A named fault as a change of what the layer is evaluated on, so that any evaluator of the recipe computes the faulty result itself.

Most faults change the loaded experts, the hidden states, the routing or the recipe; a few change what each expert contributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from harness.faults import TILE, Fault
from harness.inject_gains import channel_gain, expert_gain
from harness.inject_humming import QUARTER, as_e5m0
from harness.inject_marlin import in_order_of_channels, in_order_of_groups, read_as_16_bits, unpermuted
from harness.inject_router import twice_on_input, twice_on_output
from harness.inject_zero_points import less_the_middle, less_the_stored
from references.formats import decode
from references.loading import LoadedExpert, Matrix
from references.moe import Expert, Projection, Routing
from references.quantize import quantize_activations
from references.routing import route
from references.scales import GROUP
from references.vocabulary import Activation, Layout, Recipe, Rounding, Swiglu, W13Merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything an evaluator of the recipe needs. hidden_states [M, H] in any float dtype, router_logits [M, E] fp32."""

    experts: tuple[Expert, ...]  # as the checkpoint holds them
    loaded: tuple[LoadedExpert, ...]  # as loading leaves them
    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    routing: Routing
    renormalize: bool
    activation: Activation
    recipe: Recipe


Evaluate = Callable[[Inputs], torch.Tensor]
"""Contributions [M, k, H]: what each of a token's k experts adds to its row, router weight included."""


def contributions(fault: Fault | None, inputs: Inputs, evaluate: Evaluate) -> torch.Tensor:
    """What ``evaluate`` gives for ``inputs`` with ``fault`` in them, [M, k, H]."""
    return with_all(() if fault is None else (fault,), inputs, evaluate)


def with_all(faults: tuple[Fault, ...], inputs: Inputs, evaluate: Evaluate) -> torch.Tensor:
    """The same for several faults at once."""
    after = []
    for fault in faults:
        before, inputs = inputs, changed(fault, inputs)
        after += [_AFTER[fault]] if inputs is before else []
    given = evaluate(inputs)
    for change in after:
        given = change(given, inputs.routing)
    return given


def changed(fault: Fault, inputs: Inputs) -> Inputs:
    """``inputs`` with ``fault`` in them; the very same where it changes only what was contributed."""
    return _BEFORE[fault](inputs) if fault in _BEFORE else inputs


def separable(fault: Fault) -> bool:
    """Whether the fault may hold for some experts and not for others: it changes nothing but loaded experts, each for itself."""
    return fault in _PER_EXPERT


# ------------------------------------------------------------------------------------------------------- one matrix, its scale


def _scale(matrix: Matrix) -> torch.Tensor:
    """[N, G] float64."""
    if matrix.scale is None:
        raise ValueError("the weights have no scale: faults.py declares this fault not applicable")
    return matrix.scale


def _rescaled(matrix: Matrix, scale: torch.Tensor) -> Matrix:
    return replace(matrix, scale=scale)


def _recoded(matrix: Matrix, codes: torch.Tensor) -> Matrix:
    return replace(matrix, codes=codes, low=codes, high=codes)


def _transposed(scale: torch.Tensor, halves: int) -> torch.Tensor:
    """The [blocks, G] buffer behind [N, G] read as if it were stored column-major."""
    rows = scale.shape[0] // halves
    blocks = scale.reshape(halves, rows, -1)[:, ::GROUP].flatten(0, 1)
    wrong = blocks.flatten().reshape(blocks.shape[1], blocks.shape[0]).T
    return wrong.reshape(halves, -1, wrong.shape[1]).repeat_interleave(GROUP, 1)[:, :rows].flatten(0, 1)


def _tail_dropped(matrix: Matrix) -> Matrix:
    codes = matrix.codes.clone()
    codes[:, (codes.shape[1] - 1) // TILE * TILE :] = 0
    return _recoded(matrix, codes)


def _nibbles_swapped(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
    return _recoded(matrix, matrix.codes.unflatten(1, (-1, 2)).flip(2).flatten(1))


def _middle_zero_points(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
    return _recoded(matrix, less_the_middle(matrix, inputs.experts[e], down=matrix is inputs.loaded[e].w2))


def _halves(inputs: Inputs) -> int:
    return 2 if inputs.activation.gated else 1


# ------------------------------------------------------------------------------------------------------- experts, each for itself

PerExpert = Callable[[Inputs, int], LoadedExpert]


def _w13(change: Callable[[Inputs, int, Matrix], Matrix]) -> PerExpert:
    return lambda inputs, e: replace(inputs.loaded[e], w13=change(inputs, e, inputs.loaded[e].w13))


def _w2(change: Callable[[Inputs, int, Matrix], Matrix]) -> PerExpert:
    return lambda inputs, e: replace(inputs.loaded[e], w2=change(inputs, e, inputs.loaded[e].w2))


def _scaled(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs, int, Matrix], Matrix]:
    return lambda inputs, e, matrix: _rescaled(matrix, change(_scale(matrix)))


def _flat(name: str) -> Callable[[Inputs, int, Matrix], Matrix]:
    def change(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
        buffer = torch.stack([_scale(getattr(expert, name)) for expert in inputs.loaded])
        return _rescaled(matrix, torch.full_like(_scale(matrix), float(buffer.flatten()[e])))

    return change


def _neighbour(name: str) -> Callable[[Inputs, int, Matrix], Matrix]:
    def change(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
        return _rescaled(matrix, _scale(getattr(inputs.loaded[(e + 1) % len(inputs.loaded)], name)))

    return change


def _activation_scale(name: str, power: int) -> Callable[[Inputs, int, Matrix], Matrix]:
    """A static activation scale left out (-1) or applied once more (1), folded into the weight's."""

    def change(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
        return _rescaled(matrix, _scale(matrix) * float(getattr(inputs.loaded[e], name)) ** power)

    return change


def _swapped(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
    def swap(part: torch.Tensor) -> torch.Tensor:
        return torch.cat(part.chunk(2)[::-1])

    bias = None if matrix.bias is None else swap(matrix.bias)
    scale = None if matrix.scale is None else swap(matrix.scale)
    return replace(_recoded(matrix, swap(matrix.codes)), bias=bias, scale=scale)


def _one_scale(pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Inputs, int, Matrix], Matrix]:
    """Both halves of w13 with ``pick(gate scale, up scale)``; per-tensor halves with the checkpoint's codes, not requantized."""

    def change(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
        gate, up = inputs.experts[e].gate, inputs.experts[e].up
        if inputs.recipe.w13_merge is W13Merge.REQUANTIZE_TO_MAX and gate is not None:
            matrix = _recoded(matrix, torch.cat([decode(gate.codes, gate.format), decode(up.codes, up.format)]))
            both = pick(_stored_scale(gate), _stored_scale(up))
            return _rescaled(matrix, both.expand(matrix.codes.shape[0], 1))
        return _rescaled(matrix, pick(*_scale(matrix).chunk(2)).repeat(2, 1))

    return change


def _stored_scale(half: Projection) -> torch.Tensor:
    if half.scale is None:
        raise ValueError("the checkpoint holds no scale: faults.py declares this fault not applicable")
    return half.scale.to(torch.float64).reshape(1, 1)


def _bias_plus_one(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
    rows = matrix.codes.shape[0]
    one = (torch.arange(rows) >= rows // 2).to(torch.float64)
    return replace(matrix, bias=one if matrix.bias is None else matrix.bias + one)


def _bias_scaled(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
    return matrix if matrix.bias is None else replace(matrix, bias=matrix.bias * _scale(matrix)[:, 0])


def _in_marlins_order(matrix: Matrix, bias: torch.Tensor | None, halves: int) -> Matrix:
    return matrix if bias is None else replace(matrix, bias=unpermuted(bias, halves))


def _in_order(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs, int, Matrix], Matrix]:
    return lambda inputs, e, matrix: _rescaled(matrix, torch.cat([of(half) for half in _scale(matrix).chunk(_halves(inputs))]))


def _read_as_16_bits(name: str) -> Callable[[Inputs, int, Matrix], Matrix]:
    def change(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
        stored = [bias for bias in (getattr(expert, name).bias for expert in inputs.loaded) if bias is not None]
        halves = _halves(inputs) if name == "w13" else 1
        return _in_marlins_order(matrix, read_as_16_bits(torch.stack(stored), e, inputs.recipe.output), halves)

    return change


def _both(first: PerExpert, second: PerExpert) -> PerExpert:
    return lambda inputs, e: replace(first(inputs, e), w2=second(inputs, e).w2)


def _no_bias(inputs: Inputs, e: int, matrix: Matrix) -> Matrix:
    return replace(matrix, bias=None)


_PER_EXPERT: dict[Fault, PerExpert] = {
    Fault.W13_TAIL_K_DROPPED: _w13(lambda inputs, e, matrix: _tail_dropped(matrix)),
    Fault.W2_TAIL_K_DROPPED: _w2(lambda inputs, e, matrix: _tail_dropped(matrix)),
    Fault.W13_SCALE_NOT_APPLIED: _w13(_scaled(torch.ones_like)),
    Fault.W2_SCALE_NOT_APPLIED: _w2(_scaled(torch.ones_like)),
    Fault.A2_SCALE_NOT_APPLIED: _w2(_activation_scale("a2_scale", -1)),
    Fault.W13_SCALE_APPLIED_TWICE: _w13(_scaled(torch.square)),
    Fault.W2_SCALE_APPLIED_TWICE: _w2(_scaled(torch.square)),
    Fault.A2_SCALE_APPLIED_TWICE: _w2(_activation_scale("a2_scale", 1)),
    Fault.W13_INVERSE_SCALE: _w13(_scaled(torch.reciprocal)),
    Fault.W2_INVERSE_SCALE: _w2(_scaled(torch.reciprocal)),
    Fault.W_SCALE_FLAT_INDEX: _both(_w13(_flat("w13")), _w2(_flat("w2"))),
    Fault.W13_SCALE_FLAT_INDEX: _w13(_flat("w13")),
    Fault.W2_SCALE_FLAT_INDEX: _w2(_flat("w2")),
    Fault.W13_SCALE_OF_NEIGHBOUR_EXPERT: _w13(_neighbour("w13")),
    Fault.W2_SCALE_OF_NEIGHBOUR_EXPERT: _w2(_neighbour("w2")),
    Fault.W13_SCALE_TRANSPOSED: _w13(lambda inputs, e, matrix: _rescaled(matrix, _transposed(_scale(matrix), _halves(inputs)))),
    Fault.W2_SCALE_TRANSPOSED: _w2(_scaled(lambda scale: _transposed(scale, 1))),
    Fault.BLOCK_OFF_BY_ONE: _both(_w13(_scaled(lambda s: s.roll(1, 1))), _w2(_scaled(lambda s: s.roll(1, 1)))),
    Fault.W13_CHANNEL_ROLLED: _w13(_scaled(lambda scale: scale.roll(1, 0))),
    Fault.W2_CHANNEL_ROLLED: _w2(_scaled(lambda scale: scale.roll(1, 0))),
    Fault.W13_SCALES_IN_ORDER_OF_CHANNELS: _w13(_in_order(in_order_of_channels)),
    Fault.W13_SCALES_IN_ORDER_OF_GROUPS: _w13(_in_order(in_order_of_groups)),
    Fault.ZERO_POINTS_IGNORED: _both(_w13(_middle_zero_points), _w2(_middle_zero_points)),
    Fault.ZERO_POINTS_AS_STORED: _both(
        _w13(lambda inputs, e, m: _recoded(m, less_the_stored(m.codes))), _w2(lambda inputs, e, m: _recoded(m, less_the_stored(m.codes)))
    ),
    Fault.NIBBLES_SWAPPED: _both(_w13(_nibbles_swapped), _w2(_nibbles_swapped)),
    Fault.GATE_UP_SWAPPED: _w13(_swapped),
    Fault.GATE_SCALE_FOR_UP: _w13(_one_scale(lambda gate, up: gate)),
    Fault.UP_SCALE_FOR_GATE: _w13(_one_scale(lambda gate, up: up)),
    Fault.MAX_SCALE_WITHOUT_REQUANT: _w13(_one_scale(torch.maximum)),
    Fault.BIAS_DROPPED: _both(_w13(_no_bias), _w2(_no_bias)),
    Fault.W13_BIAS_DROPPED: _w13(_no_bias),
    Fault.W2_BIAS_DROPPED: _w2(_no_bias),
    Fault.BIAS_SCALED: _both(_w13(_bias_scaled), _w2(_bias_scaled)),
    Fault.BIAS_NOT_PERMUTED: _both(
        _w13(lambda inputs, e, m: _in_marlins_order(m, m.bias, _halves(inputs))), _w2(lambda inputs, e, m: _in_marlins_order(m, m.bias, 1))
    ),
    Fault.BIAS_READ_AS_16_BITS: _both(_w13(_read_as_16_bits("w13")), _w2(_read_as_16_bits("w2"))),
    Fault.UP_PLUS_ONE: _w13(_bias_plus_one),
}

# ------------------------------------------------------------------------------------------------------- everything else before


def _each(change: PerExpert) -> Callable[[Inputs], Inputs]:
    return lambda inputs: replace(inputs, loaded=tuple(change(inputs, e) for e in range(len(inputs.loaded))))


def _row_scales(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states in float64 and the dynamic a1 scale of each element, never 0."""
    x = inputs.hidden_states.to(torch.float64)
    how = inputs.recipe.a1
    if how is None:
        raise ValueError("activations are not quantized: faults.py declares this fault not applicable")
    scale = quantize_activations(x, how).scale.expand_as(x)
    return x, scale.masked_fill(scale == 0, 1.0)


def _a1_scale(power: int) -> Callable[[Inputs], Inputs]:
    def change(inputs: Inputs) -> Inputs:
        if inputs.recipe.a1 is not None and not inputs.recipe.a1.dynamic:
            return _each(_w13(_activation_scale("a1_scale", power)))(inputs)
        x, scale = _row_scales(inputs)
        return replace(inputs, hidden_states=x * scale**power)  # its own dynamic scale then is scale**(1 + power), its codes the same

    return change


def _token_zero(inputs: Inputs) -> Inputs:
    x, scale = _row_scales(inputs)
    return replace(inputs, hidden_states=x / scale * scale[:1])


def _static_swapped(inputs: Inputs) -> Inputs:
    return replace(inputs, loaded=tuple(replace(e, a1_scale=e.a2_scale, a2_scale=e.a1_scale) for e in inputs.loaded))


def _recipe(**changes: object) -> Callable[[Inputs], Inputs]:
    """Both activation quantizers changed."""

    def change(inputs: Inputs) -> Inputs:
        a1, a2 = (None if how is None else replace(how, **changes) for how in (inputs.recipe.a1, inputs.recipe.a2))  # type: ignore[arg-type]
        return replace(inputs, recipe=replace(inputs.recipe, a1=a1, a2=a2))

    return change


def _unquantized(inputs: Inputs) -> Inputs:
    return replace(inputs, recipe=replace(inputs.recipe, a1=None, a2=None))


def _rerouted(change: Callable[[Routing, int], Routing]) -> Callable[[Inputs], Inputs]:
    return lambda inputs: replace(inputs, routing=change(inputs.routing, len(inputs.loaded)))


def _renormalize_flipped(inputs: Inputs) -> Inputs:
    flipped = route(inputs.router_logits, inputs.routing.topk_ids.shape[1], not inputs.renormalize)
    return replace(inputs, routing=flipped, renormalize=not inputs.renormalize)


def _other_activation(activation: Activation) -> Activation:
    if activation.gated:
        return Activation.SILU if activation in (Activation.GELU, Activation.GELU_TANH) else Activation.GELU
    return Activation.GELU_NO_MUL if activation is Activation.SILU_NO_MUL else Activation.SILU_NO_MUL


def _without_limits(swiglu: Swiglu | None) -> Swiglu:
    return replace(swiglu or Swiglu(), limit=None, linear=None)


def _weighted_again(inputs: Inputs) -> Inputs:
    if (known := twice_on_input(inputs)) is not inputs:
        return known
    return replace(inputs, hidden_states=inputs.hidden_states.to(torch.float64) * inputs.routing.topk_weights[:, :1])


_BEFORE: dict[Fault, Callable[[Inputs], Inputs]] = {
    **{fault: _each(change) for fault, change in _PER_EXPERT.items()},
    Fault.SMALL_SCALES_FLUSHED: _each(_both(_w13(_scaled(as_e5m0)), _w2(_scaled(as_e5m0)))),  # of all experts or of none
    Fault.ROUNDED_AT_A_QUARTER: lambda inputs: replace(inputs, recipe=replace(inputs.recipe, stored_share=QUARTER)),
    Fault.A1_SCALE_NOT_APPLIED: _a1_scale(-1),
    Fault.A1_SCALE_APPLIED_TWICE: _a1_scale(1),
    Fault.A_SCALE_OF_TOKEN_ZERO: _token_zero,
    Fault.A1_A2_SWAPPED: _static_swapped,
    Fault.DYNAMIC_SCALE_PER_TENSOR: _recipe(layout=Layout.TENSOR),
    Fault.ROUNDING_TRUNCATES: _recipe(rounding=Rounding.TOWARD_ZERO),
    Fault.ACTIVATIONS_NOT_QUANTIZED: _unquantized,
    Fault.EXPERT_IDS_SHIFTED: _rerouted(lambda routing, experts: replace(routing, topk_ids=(routing.topk_ids + 1) % experts)),
    Fault.ROUTER_WEIGHT_DROPPED: _rerouted(lambda routing, experts: replace(routing, topk_weights=torch.ones_like(routing.topk_weights))),
    Fault.ROUTER_WEIGHT_TWICE: twice_on_output,
    Fault.ROUTER_WEIGHT_TWICE_ON_INPUT: _weighted_again,
    Fault.RENORMALIZE_FLIPPED: _renormalize_flipped,
    Fault.WRONG_ACTIVATION: lambda inputs: replace(
        inputs, activation=_other_activation(inputs.activation), recipe=replace(inputs.recipe, swiglu=None)
    ),
    Fault.LIMITS_IGNORED: lambda inputs: replace(inputs, recipe=replace(inputs.recipe, swiglu=_without_limits(inputs.recipe.swiglu))),
}

# ------------------------------------------------------------------------------------------------------- what was contributed


def _last_expert_dropped(given: torch.Tensor, routing: Routing) -> torch.Tensor:
    return given * (routing.topk_ids < int(routing.topk_ids.max())).unsqueeze(2)


def _slot_dropped(given: torch.Tensor, routing: Routing) -> torch.Tensor:
    return torch.cat([given[:, :-1], torch.zeros_like(given[:, -1:])], 1)


def _stale(given: torch.Tensor, routing: Routing) -> torch.Tensor:
    return torch.cat([given[:-1], given[:1]])


def _columns_dropped(given: torch.Tensor, routing: Routing) -> torch.Tensor:
    kept = torch.arange(given.shape[2]) < (given.shape[2] - 1) // TILE * TILE
    return given * kept


_AFTER: dict[Fault, Callable[[torch.Tensor, Routing], torch.Tensor]] = {
    Fault.ZERO_OUTPUT: lambda given, routing: torch.zeros_like(given),
    Fault.LAST_EXPERT_DROPPED: _last_expert_dropped,
    Fault.TOPK_SLOT_DROPPED: _slot_dropped,
    Fault.STALE_ROW: _stale,
    Fault.TAIL_COLUMNS_DROPPED: _columns_dropped,
    Fault.ROUTER_WEIGHT_TWICE: lambda given, routing: given * routing.topk_weights.unsqueeze(2).to(given.dtype),
    Fault.EXPERT_GAIN_1_008: expert_gain,
    Fault.CHANNEL_GAIN_1_05: channel_gain,
}
