"""Asking a subject on a GPU for one check of device_checks.py, and the verdict. Outputs are compared with outputs, bit for bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from cases.axes import Routing
from cases.batch import Batch, make_batch
from cases.checkpoint import Checkpoint, make_checkpoint
from cases.packed import W4A8_MULTIPLE, is_packed
from harness import judge, repeatable
from harness.backends import Backend
from harness.compare import Bits, bits, compare
from harness.device_checks import BY_PLACE, CLAIMS, DeviceCheck
from harness.expected import expected
from harness.far import far_expert, far_rows
from harness.pipeline import PairResult
from harness.recipes import recipe
from harness.subject import LoadFailed, SubjectError
from harness.subject.modes import Mode
from harness.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from cases.case import Entry, MoECase
    from harness.pairs import Pair
    from harness.subject import HasModes, Loaded
    from references.moe import Answer

PATTERNS = (0x00, 0xFF, 0x7F)  # zero; NaN of every float and -1; the largest bf16 and fp32, NaN of e4m3
RUNS = 20
_FACTOR = 2.0
_SWAPPED_SIZES = ((1, 256, 256), (2, 256, 128), (8, 512, 128), (16, 256, 384), (33, 256, 256))  # M, H, I: whole blocks and groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Two outputs that should be the same bits; or, with identical bits, two that should not be."""

    what: str
    difference: Bits

    def __str__(self) -> str:
        different = self.difference
        if different.attributes:
            return f"{self.what}: {'; '.join(different.attributes)}"
        if different.identical:
            return self.what
        first = f"{list(different.index)}: expected {different.expected}, actual {different.actual}"
        return f"{self.what}: {different.differing} elements differ, first at {first}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a check is asked, and of whom."""

    case: MoECase
    entry: Entry
    backend: Backend
    checkpoint: Checkpoint
    batch: Batch
    subject: HasModes
    notes: list[str] = field(default_factory=list)  # for the record of a check that passes

    @cached_property
    def answer(self) -> Answer:
        """The reference's."""
        return expected(self.case, recipe(self.case, self.entry, self.backend), self.checkpoint, self.batch)

    def honest(self, output: torch.Tensor) -> bool:
        """Whether an output is one that the reference allows, where bits may differ."""
        return compare(self.answer, output).outcome is Outcome.PASS

    @property
    def other(self) -> Batch:
        """Another batch of the same shape: other tokens, twice as large, to other experts."""
        batch = make_batch(replace(self.case, seed=self.case.seed + 1))
        return replace(batch, hidden_states=batch.hidden_states.flip(0) * 2)

    def load(self) -> Loaded:
        """Raises LoadFailed."""
        return self.subject.load(self.case, self.entry, self.checkpoint)


class Vacuous(Exception):
    """What the check is about did not happen: nothing can be said. The sentence says what was missing."""


class OutOfReach(Exception):
    """This GPU lacks what the check needs. The sentence says what."""


def poisoned_memory(place: Place) -> Iterator[Broken]:
    """The layer loaded and run on memory of each pattern."""
    outputs = []
    for pattern in PATTERNS:
        place.subject.poison(pattern)
        loaded = place.load()
        place.subject.poison(pattern)
        outputs.append(place.subject.run(loaded, place.batch).output)
    for pattern, output in zip(PATTERNS[1:], outputs[1:], strict=True):
        yield from _same(f"memory full of 0x{pattern:02x} against memory full of zeros", outputs[0], output)


def lagging_stream(place: Place) -> Iterator[Broken]:
    """What is not ordered with the current stream reads what is not there yet, or is overwritten by what was asked for before it."""
    here = place.load()
    wanted = place.subject.run(here, place.batch).output
    with place.subject.lagging():
        late = place.subject.run(here, place.batch).output
    yield from _same("run on a stream that lags behind the host against the default stream", wanted, late)
    with place.subject.lagging():
        there = place.load()
    yield from _same("loaded on a stream that lags behind the host", wanted, place.subject.run(there, place.batch).output)


def _in_mode(place: Place, mode: Mode) -> Iterator[Broken]:
    loaded = place.load()
    eager = place.subject.prepare(loaded, place.batch, Mode.EAGER)
    other = place.subject.prepare(loaded, place.batch, mode)
    for name, batch in (("another batch", place.other), ("the first batch again", place.batch)):
        yield from _same(f"{mode} on {name} against eager", eager(batch), other(batch))


def _rescaled(place: Place, mode: Mode) -> Iterator[Broken]:
    loaded = place.load()
    eager = place.subject.prepare(loaded, place.batch, Mode.EAGER)
    other = place.subject.prepare(loaded, place.batch, mode)
    before = eager(place.batch)
    names = place.subject.scale_in_place(loaded, _FACTOR)
    after = eager(place.batch)
    if not names:
        raise Vacuous("the loaded layer has no weight scale that can be changed in place")
    if bits(before, after).identical:
        yield Broken(what=f"eager, {', '.join(names)} times {_FACTOR:g} in place: nothing moved", difference=Bits(identical=True))
    yield from _same(f"{mode} after {', '.join(names)} were multiplied by {_FACTOR:g} in place against eager", after, other(place.batch))


def replayed_graph(place: Place) -> Iterator[Broken]:
    """Captured on one batch, replayed on another."""
    return _in_mode(place, Mode.GRAPH)


def replayed_scales(place: Place) -> Iterator[Broken]:
    """Replayed after the scales changed."""
    return _rescaled(place, Mode.GRAPH)


def compiled(place: Place) -> Iterator[Broken]:
    """Compiled on one batch, called on another."""
    return _in_mode(place, Mode.COMPILED)


def compiled_scales(place: Place) -> Iterator[Broken]:
    """Called after the scales changed."""
    return _rescaled(place, Mode.COMPILED)


def swapped_operands(place: Place) -> Iterator[Broken]:
    """Small batches with operands swapped; against the same tiles unswapped (Triton) or a batch too large to swap (CUTLASS).

    The pair's own sizes and others: more or fewer rows, tiles of N, steps of K. Other tensor-core instructions round FP8 sums differently,
    so bits may differ where both results are honest.
    """
    asked = [_swapped(each) for each in (place, *_other_sizes(place))]
    if asked[0] is None:
        raise OutOfReach("the operands were not swapped: that is Hopper's path, for small batches")
    swapped = [each for each in asked if each is not None]
    place.notes.append(f"operands swapped at {len(swapped)} of {len(asked)} sizes")
    yield from itertools.chain.from_iterable(each.broken for each in swapped)
    wrong = [broken for each in swapped[1:] for broken in each.wrong]
    if wrong and place.honest(place.subject.run(place.load(), place.batch).output):  # else an error of the pair, at every size
        yield from wrong


class _Swapped(NamedTuple):
    """Differences of which one side is allowed and the other is not; and those of which neither is."""

    broken: list[Broken]
    wrong: list[Broken]


def _other_sizes(place: Place) -> Iterator[Place]:
    for tokens, hidden, intermediate in _SWAPPED_SIZES:
        if is_packed(place.case) and (hidden % W4A8_MULTIPLE or intermediate % W4A8_MULTIPLE):
            continue
        case = replace(place.case, tokens=tokens, hidden=hidden, intermediate=intermediate, routing=Routing.BALANCED)
        yield replace(place, case=case, checkpoint=make_checkpoint(case), batch=make_batch(case))


def _swapped(place: Place) -> _Swapped | None:
    """None: vLLM does not swap the operands there."""
    loaded = place.load()
    with place.subject.operand_swaps(allowed=True) as seen:
        swapped = place.subject.run(loaded, place.batch).output
    if not any(seen):
        return None
    copies = -(-65 // (place.case.tokens * place.case.top_k)) if place.backend is Backend.CUTLASS else 1
    with place.subject.operand_swaps(allowed=copies > 1) as seen:
        straight = place.subject.run(loaded, repeat_tokens(place.batch, copies)).output
    if any(seen) or not seen:
        raise Vacuous(f"the operands were {'swapped' if seen else 'asked for by nobody'} in the run that should not swap them")
    sizes = f"M{place.case.tokens} H{place.case.hidden} I{place.case.intermediate}"
    found = _Swapped([], [])
    for copy in straight.chunk(copies):
        broken = next(_same(f"operands swapped against not swapped, {sizes}", copy, swapped), None)
        if broken is None:
            continue
        allowed = {place.honest(swapped), place.honest(copy)}
        if allowed != {True}:
            (found.broken if len(allowed) == 2 else found.wrong).append(broken)
        place.notes.append(f"{broken}; {'each is allowed' if allowed == {True} else 'neither is allowed, which the pair itself tells'}")
    return found


def repeated_runs(place: Place) -> Iterator[Broken]:
    """The first output against every later one."""
    loaded = place.load()
    first = place.subject.run(loaded, place.batch).output
    for turn in range(1, RUNS):
        if turn % 4 == 0:
            place.subject.run(loaded, place.other)
        if broken := next(_same(f"run {turn + 1} against run 1", first, place.subject.run(loaded, place.batch).output), None):
            yield broken
            return


def _far_expert(place: Place) -> Iterator[Broken]:
    far = far_expert(place.case)
    _reach(place.subject, far.bytes_needed)
    loaded = place.subject.load(far.case, place.entry, far.checkpoint)
    near, away = (place.subject.run(loaded, batch).output for batch in far.batches)
    if not bool(near.isfinite().all() & near.any()):
        raise Vacuous("the near expert gives zeros or infinities")
    broken = next(_same(f"expert {far.case.experts - 1} of {far.case.experts} against its copy, expert 0", near, away), None)
    if broken is None:
        return
    if why := BY_PLACE.get(place.backend):
        place.notes.append(f"{broken}; copies may differ ({why}), each is allowed")
        batch = replace(far.batches[0], router_logits=far.batches[0].router_logits[:, : far.small.experts])
        alone = replace(place, case=far.small, checkpoint=make_checkpoint(far.small), batch=batch)
        if alone.honest(near) and alone.honest(away):
            return
    yield broken


def _far_rows(place: Place) -> Iterator[Broken]:
    far = far_rows(place.case)
    _reach(place.subject, far.bytes_needed)
    loaded = place.subject.load(far.case, place.entry, far.checkpoint)
    output = place.subject.run(loaded, far.batches[0]).output
    copies = output.view(-1, far.period, output.shape[1])
    if not bool(copies[0].isfinite().all() & copies[0].any()):
        raise Vacuous("the near rows are zeros or infinities")
    wrong = (copies != copies[0]).any(2)
    if not bool(wrong.any()):
        return
    copy, token = (int(i) for i in wrong.nonzero()[0])
    what = f"token {token}, copy {copy} of {len(copies)}; {int(wrong.sum())} rows differ"
    broken = next(_same(what, copies[0, token], copies[copy, token]))
    if why := BY_PLACE.get(place.backend):
        place.notes.append(f"{broken}; rows may differ ({why}), each is allowed")
        near = replace(place, case=far.small, checkpoint=far.checkpoint, batch=make_batch(far.small))
        if all(near.honest(each) for each in copies[wrong.any(1)]):
            return
    yield broken


def _reach(subject: HasModes, needed: int) -> None:
    if (free := subject.free_bytes()) < needed:
        raise OutOfReach(f"it needs {needed / 2**30:.0f} GiB of device memory, and {free / 2**30:.1f} GiB are free for this process")


ASKED: dict[DeviceCheck, Callable[[Place], Iterator[Broken]]] = {
    DeviceCheck.POISONED_MEMORY: poisoned_memory,
    DeviceCheck.LAGGING_STREAM: lagging_stream,
    DeviceCheck.REPLAYED_GRAPH: replayed_graph,
    DeviceCheck.REPLAYED_SCALES: replayed_scales,
    DeviceCheck.COMPILED: compiled,
    DeviceCheck.COMPILED_SCALES: compiled_scales,
    DeviceCheck.SWAPPED_OPERANDS: swapped_operands,
    DeviceCheck.REPEATED_RUNS: repeated_runs,
    DeviceCheck.FAR_EXPERT: _far_expert,
    DeviceCheck.FAR_ROWS: _far_rows,
}


def repeat_tokens(batch: Batch, copies: int) -> Batch:
    """Every token ``copies`` times, the batch as a whole one after another."""
    weights, ids = (None if each is None else each.repeat(copies, 1) for each in (batch.topk_weights, batch.topk_ids))
    hidden_states, router_logits = batch.hidden_states.repeat(copies, 1), batch.router_logits.repeat(copies, 1)
    return Batch(hidden_states=hidden_states, router_logits=router_logits, topk_weights=weights, topk_ids=ids)


def _same(what: str, wanted: torch.Tensor, got: torch.Tensor) -> Iterator[Broken]:
    difference = bits(wanted, got)
    if not difference.identical:
        yield Broken(what=what, difference=difference)


def verdict(check: DeviceCheck, place: Place) -> Verdict:
    """PASS, NOT_IDENTICAL or NONDETERMINISTIC with what broke, UNAVAILABLE where the GPU lacks what it takes, or what vLLM raised."""
    try:
        broken = list(ASKED[check](place))
        if broken and check is DeviceCheck.REPEATED_RUNS and (why := repeatable.why_not(place.case, place.entry, place.backend)):
            return _each_allowed(place, broken, why)
    except SubjectError as error:
        return judge.raised(Outcome.LOAD_ERROR if isinstance(error, LoadFailed) else Outcome.RUN_ERROR, error.detail)
    except OutOfReach as error:
        return Verdict(outcome=Outcome.UNAVAILABLE, claim=str(error))
    except Vacuous as error:
        return Verdict(outcome=Outcome.RUN_ERROR, claim=f"{CLAIMS[check]}; not asked: {error}", detail=str(error), signature="VACUOUS")
    if not broken:
        return Verdict(outcome=Outcome.PASS, claim=CLAIMS[check], margin=0.0, detail="\n".join(place.notes))
    detail = "\n".join(map(str, broken))
    return Verdict(
        outcome=Outcome.NONDETERMINISTIC if check is DeviceCheck.REPEATED_RUNS else Outcome.NOT_IDENTICAL,
        claim=f"{CLAIMS[check]}; {len(broken)} comparisons do otherwise",
        spread={"elements": [broken[0].difference.differing, place.batch.hidden_states.numel()]},
        detail=detail,
        signature=check.name,
    )


def _each_allowed(place: Place, broken: list[Broken], why: str) -> Verdict:
    """Of runs that may differ. Raises SubjectError."""
    honest = all(place.honest(place.subject.run(place.load(), place.batch).output) for _ in range(RUNS))
    return Verdict(
        outcome=Outcome.PASS if honest else Outcome.MISMATCH,
        claim=f"runs may differ ({why}), each allowed by the reference",
        detail="\n".join(map(str, broken)),
        signature="" if honest else DeviceCheck.REPEATED_RUNS.name,
    )


def run_check(check: DeviceCheck, pair: Pair, backend: Backend, subject: HasModes) -> PairResult:
    """One check of one pair, as harness/pipeline.py runs a pair. What vLLM raises becomes an outcome; what we get wrong propagates."""
    began = time.perf_counter()
    case, entry = pair
    place = Place(case=case, entry=entry, backend=backend, checkpoint=make_checkpoint(case), batch=make_batch(case), subject=subject)
    result = verdict(check, place)
    return PairResult(verdict=result, timings={"check": time.perf_counter() - began}, extras={"recipe": recipe(case, entry, backend).name})
