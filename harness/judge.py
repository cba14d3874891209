"""Judging: what was compared becomes a verdict, plain data without a tensor. message.py says it in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cases.axes import Data
from cases.batch import Batch
from cases.case import MoECase
from cases.checkpoint import Checkpoint
from harness import expected
from harness.compare import Comparison, show
from harness.explained import EXPLAINS, NEAR, Left, explanation, has_interval, left, no_interval, of_the_lane
from harness.faults import Fault, applicable
from harness.fit import affected, everywhere, fit, fit_together, gain_residual
from harness.gains import Gain, Gains, Group, gains
from harness.inject import Inputs
from harness.pattern import pattern
from harness.refusals import Refusal
from harness.verdict import NOT_FINITE, UNREASONED, FaultFit, Outcome, Verdict
from references.loading import load
from references.moe import Answer
from references.vocabulary import Recipe

HALVES = 0.5  # a factor is established by its own statistics: it names the deviation when it is the larger part of it
_RUNNERS_UP = 2
_SEEN_TOGETHER = (  # at most one of each
    (Fault.BIAS_DROPPED, Fault.BIAS_NOT_PERMUTED, Fault.BIAS_READ_AS_16_BITS),
    (Fault.ROUTER_WEIGHT_TWICE, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT),
    (Fault.W13_SCALES_IN_ORDER_OF_CHANNELS, Fault.W13_SCALES_IN_ORDER_OF_GROUPS),
)
_SHOWN = 8  # gains per verdict


def raised(outcome: Outcome, detail: str) -> Verdict:
    """vLLM raised where the table says it works. The signature is the exception with its first sentence."""
    claim = "the checkpoint must load" if outcome is Outcome.LOAD_ERROR else "the loaded layer must run"
    first = detail.strip().partition("\n")[0]
    return Verdict(outcome=outcome, claim=f"{claim}, but vLLM raised {first}", detail=detail, signature=first)


def not_refused(reason: str) -> Verdict:
    """A declared refusal that did not happen."""
    claim = f"declared as refused ({reason}), but it ran: the table is out of date"
    return Verdict(outcome=Outcome.RUN_ERROR, claim=claim, signature="NOT_REFUSED")


def refused(refusal: Refusal, detail: str) -> Verdict:
    """A declared refusal was refused; ``detail``: vLLM's words, or the error that stands where a reason should."""
    if refusal.reasoned:
        return Verdict(outcome=Outcome.UNSUPPORTED, claim=f"refused by design: {refusal.reason}", detail=detail)
    return Verdict(outcome=Outcome.UNSUPPORTED, claim=f"refused without a reason: {refusal.reason}", detail=detail, signature=UNREASONED)


def wrong_class(ran: str, wanted: Iterable[str]) -> Verdict:
    """Another class than the forced backend's ran."""
    claim = f"{ran} ran where {' or '.join(sorted(wanted))} was forced"
    return Verdict(outcome=Outcome.RUN_ERROR, claim=claim, signature=f"WRONG_CLASS:{ran}")


def judge(
    case: MoECase, recipe: Recipe, checkpoint: Checkpoint, batch: Batch, answer: Answer, actual: torch.Tensor, comparison: Comparison
) -> Verdict:
    """The verdict of a pair that ran. Faults are fitted only when something is wrong."""
    if comparison.attributes:
        return Verdict(outcome=Outcome.MISMATCH, claim="; ".join(comparison.attributes), signature="ATTRIBUTES")
    measured = gains(answer, actual, case.experts)
    flagged = measured.flagged()
    exact = case.data is Data.LATTICE and bool((answer.low == answer.high).all())
    outcome = comparison.outcome
    if outcome is Outcome.PASS and flagged:
        outcome = Outcome.MISMATCH
    if outcome is Outcome.MISMATCH and exact:
        outcome = Outcome.NOT_IDENTICAL
    if outcome in (Outcome.PASS, Outcome.NONDETERMINISTIC):
        return Verdict(
            outcome=outcome,
            claim=_claim(outcome, recipe, exact, comparison, flagged),
            margin=comparison.margin,
            gains=_gains(measured, flagged),
            spread={"changed between two runs": comparison.changed} if comparison.changed else {},
            signature="" if outcome is Outcome.PASS else outcome.value,
        )
    inputs = _inputs(case, recipe, checkpoint, batch, answer)
    faults = [fault for fault in Fault if applicable(fault, case, recipe) or of_the_lane(fault, inputs)]
    fits = fit(inputs, answer, actual, faults)
    whole = explanation(fits, inputs, actual)
    if whole is None and (whole := explanation(everywhere(fits, inputs, answer), inputs, actual)) is not None:
        fits = (whole, *(each for each in fits if each.fault != whole.fault))
    if fits and whole is None:  # a lane may drop biases and weight its input twice: no one of them explains that
        groups = [[f for f in faults if f in group and no_interval(f, inputs) is None] for group in _SEEN_TOGETHER]
        together = fit_together(inputs, answer, actual, groups)
        whole, fits = explanation(together, inputs, actual), (*together[:1], *fits)
    fits = tuple(sorted(fits, key=lambda each: (each != whole, each.residual)))[: 1 + _RUNNERS_UP]
    cause = whole or next((each for each in fits if each.residual <= EXPLAINS and has_interval(each, inputs)), None)
    beyond = left(cause, inputs, actual) if cause is not None and cause != whole else None
    signature = _fault_signature(cause, beyond, inputs, answer, comparison) or _gain_signature(answer, actual, flagged) or _nearest(fits)
    if exact and not bool(torch.isfinite(actual).any()):  # lattices hold no faults apart that leave nothing finite
        signature = NOT_FINITE
    live = (answer.expected != 0) | (actual != 0)
    where = pattern(comparison.bad, live, answer.routing.topk_ids) or _gain_pattern(flagged)
    return Verdict(
        outcome=outcome,
        claim=_claim(outcome, recipe, exact, comparison, flagged),
        margin=comparison.margin,
        worst=_worst(answer, actual, comparison),
        spread=_spread(answer, comparison),
        pattern=where,
        gains=_gains(measured, flagged),
        fits=fits,
        detail=_beyond(cause, beyond) if cause is not None else "",
        signature=signature,
    )


def _inputs(case: MoECase, recipe: Recipe, checkpoint: Checkpoint, batch: Batch, answer: Answer) -> Inputs:
    stored = expected.experts(case, checkpoint)
    return Inputs(
        experts=stored,
        loaded=answer.loaded or load(stored, recipe),
        hidden_states=batch.hidden_states,
        router_logits=batch.router_logits,
        routing=answer.routing,
        renormalize=case.renormalize,
        activation=case.activation,
        recipe=recipe,
    )


def _claim(outcome: Outcome, recipe: Recipe, exact: bool, comparison: Comparison, flagged: tuple[Gain, ...]) -> str:
    if outcome is Outcome.NONDETERMINISTIC:
        return f"two runs on the same input give the same bits; {comparison.changed} elements differ"
    if exact:
        claim = f"every sum of this case is exact, so the output equals the reference's (recipe {recipe.name})"
    else:
        claim = f"every element lies among the results an honest kernel may give (recipe {recipe.name})"
    bad = int(comparison.bad.sum())
    if bad:
        return f"{claim}; {bad} of {comparison.bad.numel()} do not"
    if flagged:
        groups = "group" if len(flagged) == 1 else "groups"
        return f"{claim}, and on average it is neither more nor less than expected; {len(flagged)} {groups} of elements differ by a factor"
    return claim


def _worst(answer: Answer, actual: torch.Tensor, comparison: Comparison) -> dict[str, object]:
    """The worst element. Of several infinite margins, the one farthest from what was expected."""
    distance = (actual.to(torch.float64) - answer.expected).abs().nan_to_num(torch.inf, torch.inf)
    worst = comparison.margins == comparison.margins.max()
    flat = int(torch.where(worst, distance, -1.0).argmax())
    index = (flat // actual.shape[1], flat % actual.shape[1])
    return {
        "index": list(index),
        "actual": float(actual[index]),
        "bits": show(actual[index]).partition(" ")[2].strip("()"),
        "expected": float(answer.expected[index]),
        "low": float(answer.low[index]),
        "high": float(answer.high[index]),
        "experts": answer.routing.topk_ids[index[0]].tolist(),
    }


def _spread(answer: Answer, comparison: Comparison) -> dict[str, object]:
    bad = comparison.bad
    hit = answer.routing.topk_ids[bad.any(1)]
    spread: dict[str, object] = {
        "elements": [int(bad.sum()), bad.numel()],
        "tokens": [int(bad.any(1).sum()), bad.shape[0]],
        "channels": [int(bad.any(0).sum()), bad.shape[1]],
        "experts of bad tokens": sorted(set(hit.flatten().tolist())),
    }
    odd = {"NaN on one side": comparison.nan, "infinite on one side": comparison.inf, "changed between two runs": comparison.changed}
    return spread | {what: count for what, count in odd.items() if count}


def _gains(measured: Gains, flagged: tuple[Gain, ...]) -> dict[str, object]:
    """Every expert's alpha, se and smallest flagged deviation; and the flagged groups."""
    expert = measured.expert
    numbers = torch.stack([expert.alpha, expert.se, expert.smallest()], 1).tolist()
    experts = {str(e): numbers[e] for e in torch.isfinite(expert.alpha).nonzero().flatten().tolist()}
    shown = [
        {"group": gain.group.value, "index": list(gain.index), "alpha": gain.alpha, "se": gain.se, "smallest": gain.smallest}
        for gain in flagged[:_SHOWN]
    ]
    return {"experts": experts, "flagged": shown, "flagged groups": len(flagged)}


def _gain_pattern(flagged: tuple[Gain, ...]) -> str:
    first = flagged[0]
    names = {"expert": "expert {}", "channel": "channel {1} of expert {0}", "token": "token {}"}
    where = names[first.group.value].format(*first.index)
    rest = f", and {len(flagged) - 1} other groups" if len(flagged) > 1 else ""
    return f"{where} is {first.alpha:.6g} times what it should be{rest}"


def _fault_signature(cause: FaultFit | None, beyond: Left | None, inputs: Inputs, answer: Answer, comparison: Comparison) -> str:
    """``FAULT``, ``FAULT@all`` (every expert it could change), ``FAULT@1,3``, with ``+UNEXPLAINED`` where there is something beyond;
    ``NAN``, ``INF``; "" when nothing fits.
    """
    if cause is None:
        return "NAN" if comparison.nan else "INF" if comparison.inf else ""
    more = "" if beyond is None else "+UNEXPLAINED"
    if not cause.experts:
        return f"{cause.fault}{more}"
    every = affected(Fault[cause.fault], inputs, answer)
    return f"{cause.fault}@{'all' if cause.experts == every else ','.join(map(str, cause.experts))}{more}"


def _beyond(cause: FaultFit, beyond: Left | None) -> str:
    if beyond is None:
        return f"all elements are among the results of a layer with {cause.fault}" if cause.residual > EXPLAINS else ""
    outside = f"{beyond.elements} of {beyond.of} elements are not among the results of a layer with {cause.fault}"
    return f"{outside}, and {beyond.groups} groups of them differ from it by a factor" if beyond.groups else outside


def _nearest(fits: tuple[FaultFit, ...]) -> str:
    """``UNEXPLAINED~FAULT`` where a fault is seen through roundings as large as itself, ``UNEXPLAINED`` where none is."""
    return f"UNEXPLAINED~{fits[0].fault}" if fits and fits[0].residual <= NEAR else "UNEXPLAINED"


def _gain_signature(answer: Answer, actual: torch.Tensor, flagged: tuple[Gain, ...]) -> str:
    """``GAIN@3`` (expert), ``GAIN@3.13`` (channel 13 of expert 3), "" when no one factor is most of the deviation."""
    for gain in flagged[:_SHOWN]:
        if gain.group is not Group.TOKEN and gain_residual(answer, actual, gain) <= HALVES:
            return f"GAIN@{'.'.join(map(str, gain.index))}"
    return ""
