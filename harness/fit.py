"""Naming the cause of a mismatch: every fault that applies is computed by the reference and compared with what was seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from harness.faults import Fault
from harness.gains import Gain, Group, per_expert
from harness.inject import Inputs, contributions, separable, with_all
from harness.preimage import half_gaps
from harness.verdict import FaultFit
from references.formats import round_to
from references.moe import Answer, forward
from references.vocabulary import Format

NOT_FITTED = frozenset({Fault.EXPERT_GAIN_1_008, Fault.CHANNEL_GAIN_1_05})  # any factor may occur: gains.py finds it


def fit(inputs: Inputs, answer: Answer, actual: torch.Tensor, candidates: Iterable[Fault]) -> tuple[FaultFit, ...]:
    """All ``candidates``, the best explanation first; () when actual does not differ from expected.

    A fault that each expert has for itself is granted to the experts whose contributions show it (least squares, rounded to yes or no);
    any other holds everywhere or nowhere. Rows count alike whatever their magnitude, and what the last rounding hides counts as explained.
    """
    seen = _Seen.of(answer, actual)
    before = seen.excess(answer.expected)
    if before == _Excess(norm=0.0, positions=0):
        return ()
    fits = []
    for fault in candidates:
        if fault in NOT_FITTED:
            continue
        given = contributions(fault, inputs, evaluate)
        experts, faulty = _granted(answer, given, seen, len(inputs.loaded)) if separable(fault) else ((), given.sum(1))
        fits.append(FaultFit(fault=fault.name, experts=experts, residual=seen.excess(faulty).over(before)))
    return tuple(sorted(fits, key=lambda each: each.residual))


def fit_together(inputs: Inputs, answer: Answer, actual: torch.Tensor, groups: Iterable[Iterable[Fault]]) -> tuple[FaultFit, ...]:
    """One fault each of two or more of ``groups`` at once, everywhere; the best explanation first."""
    each_or_none = [(None, *group) for group in groups]
    together = [tuple(fault for fault in chosen if fault is not None) for chosen in itertools.product(*each_or_none)]
    seen = _Seen.of(answer, actual)
    before = seen.excess(answer.expected)
    fits = []
    for faults in (each for each in together if len(each) > 1):
        faulty = with_all(faults, inputs, evaluate).sum(1)
        left = seen.excess(faulty).over(before)
        fits.append(FaultFit(fault="+".join(fault.name for fault in faults), experts=(), residual=left))
    return tuple(sorted(fits, key=lambda each: each.residual))


def gain_residual(answer: Answer, actual: torch.Tensor, gain: Gain) -> float:
    """What one flagged gain of an expert or of one of its channels leaves of the deviation."""
    seen = _Seen.of(answer, actual)
    added = (gain.alpha - 1.0) * per_expert(answer, int(answer.routing.topk_ids.max()) + 1)[gain.index[0]]
    if gain.group is Group.CHANNEL:
        added = added * (torch.arange(added.shape[1]) == gain.index[1])
    return seen.excess(answer.expected + added).over(seen.excess(answer.expected))


def affected(fault: Fault, inputs: Inputs, answer: Answer) -> tuple[int, ...]:
    """Experts whose contribution ``fault`` changes."""
    given = contributions(fault, inputs, evaluate)
    return _changed(_by_expert(answer, given, len(inputs.loaded)))


def everywhere(fits: Iterable[FaultFit], inputs: Inputs, answer: Answer) -> tuple[FaultFit, ...]:
    """Those of ``fits`` granted to some experts only, granted to all they change: a share that roundings hide was taken for a no."""
    some = [each for each in fits if each.experts and each.residual < 1.0]
    wider = [replace(each, experts=affected(Fault[each.fault], inputs, answer)) for each in some]
    return tuple(every for every, each in zip(wider, some, strict=True) if every != each)


def evaluate(inputs: Inputs) -> torch.Tensor:
    """Contributions [M, k, H] float64, by the reference."""
    return forward(inputs.loaded, inputs.hidden_states, inputs.routing, inputs.activation, inputs.recipe)


@dataclass(frozen=True, slots=True)
class _Excess:
    """What a claim leaves unexplained: a 2-norm over finite elements, and positions of NaN and infinities that are not as claimed."""

    norm: float
    positions: int

    def over(self, before: _Excess) -> float:
        """Share of ``before`` that is left, the larger of the two shares."""
        shares = [(self.norm, before.norm), (float(self.positions), float(before.positions))]
        return max((0.0 if left == 0 else math.inf) if was == 0 else left / was for left, was in shares)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The output a claim is held against. found [M, H] float64; gap: half of the last rounding's, away from zero; scale: [M, 1]."""

    found: torch.Tensor
    gap: torch.Tensor
    scale: torch.Tensor
    output: Format

    @classmethod
    def of(cls, answer: Answer, actual: torch.Tensor) -> _Seen:
        """scale: rms of what was expected and found in a row, finite elements only; 1 for an all-zero row."""
        found = actual.to(torch.float64)
        both = torch.cat([answer.expected, found], 1).nan_to_num(0.0, 0.0, 0.0)
        rms = both.square().mean(1, keepdim=True).sqrt()
        return cls(found, half_gaps(actual, actual.dtype)[1], rms.masked_fill(rms == 0, 1.0), answer.output)

    def excess(self, claimed: torch.Tensor) -> _Excess:
        """Of ``claimed`` [M, H], beyond the last rounding."""
        wanted = round_to(claimed, self.output)
        finite = torch.isfinite(self.found) & torch.isfinite(wanted)
        beyond = ((self.found - claimed).abs() - self.gap).clamp_min(0.0) / self.scale
        if bool(finite.all()):
            return _Excess(norm=float(beyond.norm()), positions=0)
        same = finite | (self.found == wanted) | (torch.isnan(self.found) & torch.isnan(wanted))
        return _Excess(norm=float(torch.where(finite, beyond, 0.0).norm()), positions=int((~same).sum()))


def _by_expert(answer: Answer, given: torch.Tensor, experts: int) -> torch.Tensor:
    """[E, M, H]: what the fault adds to each expert's contribution."""
    return per_expert(replace(answer, contributions=given - answer.contributions), experts)


def _changed(added: torch.Tensor) -> tuple[int, ...]:
    return tuple((added != 0).flatten(1).any(1).nonzero().flatten().tolist())


def _granted(answer: Answer, given: torch.Tensor, seen: _Seen, experts: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """The experts that have the fault, and the output if just they have it."""
    added = _by_expert(answer, given, experts)
    changed = _changed(added)
    difference = (seen.found - answer.expected) / seen.scale
    usable = torch.isfinite(difference) & torch.isfinite(added).all(0)
    if not changed or not bool(usable.all()):
        return changed, given.sum(1)
    design = (added[list(changed)] / seen.scale).flatten(1).T
    size = design.norm(dim=0)
    shares = torch.linalg.lstsq(design / size, difference.reshape(-1, 1)).solution.flatten() / size
    yes = tuple(e for e, share in zip(changed, shares.tolist(), strict=True) if share > 0.5)
    return yes, answer.expected + added[list(yes)].sum(0)
