"""Relations that perturb one scale of the checkpoint and load everything again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from cases.axes import InvalidCase
from cases.perturb import Spot, perturb, scale_grid, scaled_columns, scaled_rows
from cases.roles import empty_expert, zero_expert
from harness import expected
from harness.relations import coupled
from harness.relations_check import Setting, Variant
from references.loading import load
from references.vocabulary import Activation, Layout

DOWN, UP, GATE = "down_proj", "up_proj", "gate_proj"
FACTORS = ((2.0, 0.5), (0.5, 2.0), (4.0, 0.25, 0.5))  # what is tried, in order, for the three scales of a projection that are perturbed
_UNROUTED_FACTOR = 8.0


def changed(setting: Setting, *spots: tuple[Spot, float]) -> Setting:
    """The setting with these scales multiplied."""
    checkpoint = setting.checkpoint
    for spot, factor in spots:
        checkpoint = perturb(setting.case, checkpoint, spot, factor)
    return replace(setting, checkpoint=checkpoint)


def unrouted_scale(setting: Setting) -> Iterator[Variant]:
    """Every scale of the expert without tokens."""
    expert = empty_expert(setting.case)
    assert expert is not None
    spots = [(Spot(expert=expert, projection=name), _UNROUTED_FACTOR) for name in setting.case.projections]
    change = f"all scales of expert {expert}, which has no tokens, times {_UNROUTED_FACTOR:g}"
    yield Variant(change=change, setting=changed(setting, *spots))


def down_doubles(setting: Setting) -> Iterator[Variant]:
    """All of the last expert's w2 scales, doubled."""
    expert = setting.case.experts - 1
    spot = Spot(expert=expert, projection=DOWN)
    there = changed(setting, (spot, 2.0))
    yield _variant(there, spot, 2.0, _region(setting, expert, slice(None)), f"the tokens of expert {expert}, all channels", 2.0)


def up_multiplies(setting: Setting) -> Iterator[Variant]:
    """All of the last expert's up scales, doubled. relu2 squares the factor; silu and gelu are the identity on a lattice."""
    expert = setting.case.experts - 1
    spot = Spot(expert=expert, projection=UP)
    gain = 4.0 if setting.case.activation is Activation.RELU2_NO_MUL else 2.0
    there = changed(setting, (spot, 2.0))
    yield _variant(there, spot, 2.0, _region(setting, expert, slice(None)), f"the tokens of expert {expert}, all channels", gain)


def down_scale(setting: Setting) -> Iterator[Variant]:
    """One w2 scale at a time: only the channels it scales move; by the factor itself where nothing else adds to them."""
    case = setting.case
    for spot, factor, there in _spots(setting, DOWN):
        rows = scaled_rows(case, spot)
        alone = case.top_k == 1 and not case.bias and scaled_columns(case, spot) == slice(None)
        channels = "all channels" if rows == slice(None) else f"channels {rows.start} to {min(rows.stop, case.hidden) - 1}"
        where = f"the tokens of expert {spot.expert}, {channels}"
        yield _variant(there, spot, factor, _region(setting, spot.expert, rows), where, factor if alone else None)


def up_scale(setting: Setting) -> Iterator[Variant]:
    """One up scale at a time."""
    yield from _upper(setting, UP)


def gate_scale(setting: Setting) -> Iterator[Variant]:
    """One gate scale at a time."""
    yield from _upper(setting, GATE)


def input_scale(setting: Setting) -> Iterator[Variant]:
    """a1 and a2 halved, one at a time, in the expert whose scale is the largest and kept; then both in one whose scale is not."""
    case = setting.case
    last, every = case.experts - 1, torch.ones(setting.batch.hidden_states.shape, dtype=torch.bool)
    upper = [name for name in case.projections if name != DOWN]
    for what, names in (("a1", upper), ("a2", [DOWN])):
        spots = [(Spot(expert=last, projection=name, activation=True), 0.5) for name in names]
        others = [(Spot(expert=e, projection=name, activation=True), 0.25) for name in names for e in range(last)]
        yield Variant(
            change=f"{what}: {', '.join(str(spot) for spot, _ in spots)} times 0.5, the other experts' times 0.25",
            setting=changed(setting, *spots, *others),
            where=f"every token: {what} is the largest of the experts' scales",
            region=every,
        )
    if last:
        lesser = [(Spot(expert=0, projection=name, activation=True), 0.25) for name in case.projections]
        change = "all input scales of expert 0, none of them the largest, times 0.25"
        yield Variant(change=change, setting=changed(setting, *lesser))


def _upper(setting: Setting, projection: str) -> Iterator[Variant]:
    every = coupled(setting.recipe)
    for spot, factor, there in _spots(setting, projection):
        where = f"the tokens of expert {spot.expert}"
        region = _region(setting, spot.expert, slice(None))
        if every:
            where, region = "every token: they share a dynamic scale", torch.ones_like(region)
        yield _variant(there, spot, factor, region, where, None)


def _spots(setting: Setting, projection: str) -> Iterator[tuple[Spot, float, Setting]]:
    """All scales of the last expert, one of its last, one of the first ones of the first expert in play; and the setting of each."""
    case = setting.case
    last, count = case.experts - 1, scale_grid(case, projection)[0] * scale_grid(case, projection)[1]
    first = next(e for e in range(case.experts) if e != zero_expert(case) and bool(setting.tokens_of(e).any()))
    late, early = list(reversed(range(1, count))), list(range(1, count))
    yield _seen(setting, last, projection, [None], FACTORS[0])
    yield _seen(setting, last, projection, late or [None], FACTORS[1])
    yield _seen(setting, first, projection, early or [None], FACTORS[2])


def _seen(
    setting: Setting, expert: int, projection: str, elements: Sequence[int | None], factors: Sequence[float]
) -> tuple[Spot, float, Setting]:
    """The first of the scales and factors that the reference says is seen, with the setting that it makes.

    A channel whose intermediate is 0 shows nothing; a factor may leave the range of fp16, or that in which silu is exact.
    """
    alive = _alive(setting, expert) if projection != DOWN and setting.case.weight_scale is not Layout.BLOCK128 else None
    for element in elements:
        if alive is not None and element is not None and not bool(alive[element]):
            continue
        for factor in factors:
            spot = Spot(expert=expert, projection=projection, element=element)
            there = changed(setting, (spot, factor))
            if _moves(setting, there):
                return spot, factor, there
    raise InvalidCase(f"no scale of {expert}.{projection} times a power of two is seen in the output")


def _moves(setting: Setting, there: Setting) -> bool:
    try:
        after = there.proof
    except InvalidCase:
        return False
    if after is not None and setting.proof is not None:
        return not torch.equal(after.output, setting.proof.output)
    if not bool(torch.isfinite(there.answer.low).all() & torch.isfinite(there.answer.high).all()):
        return False
    dtype = setting.batch.hidden_states.dtype
    return not torch.equal(there.answer.expected.to(dtype), setting.answer.expected.to(dtype))


def _alive(setting: Setting, expert: int) -> torch.Tensor:
    """[I] bool: intermediate channels that are not 0 for some token of the expert."""
    w13 = load(expected.experts(setting.case, setting.checkpoint), setting.recipe)[expert].w13
    sums = setting.batch.hidden_states[setting.tokens_of(expert)].to(torch.float64) @ w13.values.T
    sums = sums if w13.bias is None else sums + w13.bias
    return (sums[:, : setting.case.intermediate] > 0).any(0)


def _region(setting: Setting, expert: int, channels: slice) -> torch.Tensor:
    region = torch.zeros(setting.batch.hidden_states.shape, dtype=torch.bool)
    region[:, channels] = setting.tokens_of(expert).unsqueeze(1)
    return region


def _variant(there: Setting, spot: Spot, factor: float, region: torch.Tensor, where: str, gain: float | None) -> Variant:
    if not bool(region.any()):
        raise InvalidCase(f"{spot} scales nothing that any token sees")
    return Variant(change=f"{spot} times {factor:g}", setting=there, where=where, region=region, factor=gain)
