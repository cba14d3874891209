"""Asking a subject one question about loading, and the verdict. As harness/pipeline.py runs a pair; what we get wrong propagates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from cases.bad_checkpoints import Bad
from cases.case import Entry
from cases.checkpoint import Checkpoint, make_checkpoint
from harness import judge, load_expected, load_oracles, load_shards, load_views
from harness.architectures import requested
from harness.backends import SPECS
from harness.bad_run import run_bad
from harness.load_oracles import CLAIMS, Finding, Oracle
from harness.load_stop import needs_gpu
from harness.loading import Question
from harness.pipeline import PairResult
from harness.recipes import recipe
from harness.refusals_architecture import declared
from harness.subject import LoadFailed, RunFailed
from harness.subject.loading import Depth
from harness.verdict import Outcome, Verdict
from references.vocabulary import CheckpointFormat

if TYPE_CHECKING:
    from cases.case import MoECase
    from harness.backends import Backend
    from harness.pairs import Pair
    from harness.subject.loading import Loads, WatchedLoading

_Answers = Callable[["MoECase", Checkpoint, "Backend", "Loads", dict[str, object]], Iterable[Finding]]

SENTINELS = (0x7F, 0xFF)
UNKNOWN = "0.up_proj.moediff_unknown"
_SHOWN = 6


def ask(question: Question | Bad, pair: Pair, backend: Backend, subject: Loads) -> PairResult:
    """The verdict of one question, or on one wrong checkpoint."""
    if isinstance(question, Bad):
        return run_bad(question, pair, backend, subject)
    began = time.perf_counter()
    checkpoint = make_checkpoint(pair.case)
    extras: dict[str, object] = {}
    try:
        found = list(_ASKED[question](pair.case, checkpoint, backend, subject, extras))
    except LoadFailed as error:
        verdict = _refused(pair.case, backend, error)
    except RunFailed as error:
        verdict = judge.raised(Outcome.RUN_ERROR, error.detail)
    else:
        verdict = _verdict(question, found, str(extras.get("stops_at", "")))
    return PairResult(verdict=verdict, timings={"loading": time.perf_counter() - began}, extras=extras)


def _refused(case: MoECase, backend: Backend, error: LoadFailed) -> Verdict:
    refusal = next((each for each in declared(case, Entry.LAYER, backend) if each.matches(error.detail)), None)
    if refusal is not None:
        return judge.refused(refusal, error.detail)
    return judge.raised(Outcome.LOAD_ERROR, error.detail)


def _verdict(question: Question, found: list[Finding], stops_at: str) -> Verdict:
    """``stops_at``: what ended the conversion early, for want of a GPU."""
    if not found:
        return Verdict(outcome=Outcome.PASS, claim=_HELD[question], detail=stops_at)
    broken = list(dict.fromkeys(finding.oracle for finding in found))
    texts = [finding.text for finding in found]
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return Verdict(
        outcome=Outcome.NOT_IDENTICAL,
        claim="; ".join(f"{CLAIMS[oracle]}: it does not hold" for oracle in broken),
        margin=max((finding.over for finding in found if finding.over is not None), default=None),
        spread={"findings": len(found)},
        detail="\n".join([*texts[:_SHOWN], *more]),
        signature="+".join(sorted({finding.signature for finding in found})),
    )


def _loaded(
    case: MoECase, checkpoint: Checkpoint, backend: Backend, subject: WatchedLoading, extras: dict[str, object]
) -> Iterable[Finding]:
    first, second = (subject.watch_loading(case, checkpoint, sentinel=sentinel, unfinished=True) for sentinel in SENTINELS)
    extras |= {"quant_method": first.quant_method, "converters": [handed.converter for handed in first.handed]}
    found = [
        *load_oracles.consumed(case, checkpoint.tensors, first),
        *load_oracles.decoded(case, checkpoint.tensors, first),
        *load_oracles.sentinels(first, second),
    ]
    if load_views.speaks_of(case):
        found += load_views.converted(case, load_expected.quantized(case, checkpoint, backend), first, backend)
    found += _unknown(case, checkpoint, subject)
    if first.ended:
        extras["stops_at"] = first.ended
        if not found and not (requested() and needs_gpu(first.ended)):
            raise LoadFailed(first.ended)
    return found


def _unknown(case: MoECase, checkpoint: Checkpoint, subject: WatchedLoading) -> Iterable[Finding]:
    """A tensor that no format has, before all others. What gpt-oss's own model takes is not for the layer to say."""
    if case.checkpoint is CheckpointFormat.GPT_OSS:
        return
    some = next(iter(checkpoint.tensors.values()))
    more = replace(checkpoint, tensors={UNKNOWN: some.flatten()[:1].reshape(1, 1).clone(), **checkpoint.tensors})
    kind = UNKNOWN.rpartition(".")[2]
    try:
        seen = subject.watch_loading(case, more, sentinel=SENTINELS[0], unfinished=True)
    except LoadFailed as error:
        if kind not in error.detail:
            text = f"the error over {UNKNOWN} does not name it: {error.detail}"
            yield Finding(oracle=Oracle.UNKNOWN_ACCEPTED, what="unnamed", text=text)
        return
    into = ", ".join(seen.consumed.get(UNKNOWN, ())) or "no parameter"
    yield Finding(oracle=Oracle.UNKNOWN_ACCEPTED, what="silent", text=f"{UNKNOWN} was taken without a word, into {into}")


def _at_depth(depth: Depth) -> _Answers:
    def compare(
        case: MoECase, checkpoint: Checkpoint, backend: Backend, subject: WatchedLoading, extras: dict[str, object]
    ) -> Iterable[Finding]:
        layer, read = (
            subject.watch_loading(case, checkpoint, depth=each, sentinel=sentinel)
            for each, sentinel in zip((Depth.LAYER, depth), SENTINELS, strict=True)
        )
        extras |= {"quant_method": read.quant_method}
        return load_oracles.same(layer.after, read.after, depth.value)

    return compare


def _memory(
    case: MoECase, checkpoint: Checkpoint, backend: Backend, subject: WatchedLoading, extras: dict[str, object]
) -> Iterable[Finding]:
    if SPECS[backend].needs_gpu:
        subject.watch_loading(case, checkpoint)  # this one also compiles and tunes kernels
    seen = subject.watch_loading(case, checkpoint)
    assert seen.allocated is not None
    extras |= {"quant_method": seen.quant_method, "peak_bytes": seen.allocated.peak, "kept_bytes": seen.allocated.kept}
    return load_oracles.peak(case, seen, requantized=recipe(case, Entry.LAYER, backend).weight_requant is not None)


_ASKED: dict[Question, _Answers] = {
    Question.LOADED: _loaded,
    Question.DIRECTORY: _at_depth(Depth.DIRECTORY),
    Question.STACKED: _at_depth(Depth.STACKED),
    Question.MEMORY: _memory,
    Question.SHARDED: load_shards.divided,
}
_HELD = {
    Question.LOADED: "the layer holds the checkpoint: consumed, decoded, no memory left unwritten, converters handed what was quantized",
    Question.DIRECTORY: CLAIMS[Oracle.DEPTHS_DIFFER],
    Question.MEMORY: CLAIMS[Oracle.PEAK],
    Question.SHARDED: f"{CLAIMS[Oracle.SHARD]}; {CLAIMS[Oracle.SUM]}",
    Question.STACKED: f"{CLAIMS[Oracle.DEPTHS_DIFFER]}, also where the experts of a projection are one tensor",
}
