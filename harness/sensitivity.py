"""Every case can fail: named faults put into the fake subject, and what of each is seen.

A trial is one pair with one fault, or with none. A fault must be caught wherever faults.py says it applies; without one nothing may be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median

import torch
from rich.console import Console, Group
from rich.progress import track
from rich.table import Column, Table

from cases.batch import make_batch
from cases.case import Entry, Level, MoECase
from cases.checkpoint import make_checkpoint
from cases.generate import pairs
from cases.packed import is_packed
from harness.backends import Backend, declared_refusal
from harness.compare import compare
from harness.expected import expected
from harness.faults import Fault, applicable
from harness.gains import gains
from harness.gpus import cores
from harness.inject_gains import target
from harness.preimage import half_gaps
from harness.recipes import recipe
from harness.subject.fake import FakeSubject
from harness.verdict import Outcome
from references.moe import Answer
from references.vocabulary import Format

Pair = tuple[MoECase, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one fault did to one pair; ``fault`` None: what honesty did."""

    case: str
    entry: str
    format: str
    fault: str | None
    margin: float  # the comparison's
    size: float  # worst error over radius plus half an output gap: finite also where one value alone is allowed
    outside: bool  # an element left its interval
    factor: bool  # a gain was flagged

    @property
    def seen(self) -> bool:
        """Whether the verdict would not be PASS."""
        return self.outside or self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Smallest |gain - 1| that is flagged in one pair."""

    format: str
    expert: float  # of the expert with the largest share of the output, where EXPERT_GAIN_1_008 is put
    channel: float  # of its channel with the largest share
    median_expert: float  # over the experts that contribute
    median_channel: float


@dataclass(frozen=True, slots=True)
class Shown:
    """All trials of one pair."""

    trials: tuple[Trial, ...]
    resolution: Resolution


def name(case: MoECase) -> str:
    """The format a case is listed under: weight format and hidden dtype."""
    return f"{case.weight} {case.dtype}" if case.quantized else f"{case.dtype}"


def faults_of(pair: Pair, backend: Backend) -> tuple[Fault, ...]:
    """Faults the pair must catch."""
    how = recipe(*pair, backend)
    return tuple(fault for fault in Fault if applicable(fault, pair[0], how))


def show(pair: Pair, backend: Backend, faults: Iterable[Fault] | None = None) -> Shown:
    """The pair without a fault, then with each of ``faults`` (all that apply)."""
    case, entry = pair
    checkpoint, batch = make_checkpoint(case), make_batch(case)
    answer = expected(case, recipe(case, entry, backend), checkpoint, batch)
    trials = []
    resolution = None
    for fault in (None, *(faults_of(pair, backend) if faults is None else faults)):
        subject = FakeSubject(fault, backend)
        actual = subject.run(subject.load(case, entry, checkpoint), batch).output
        comparison, measured = compare(answer, actual), gains(answer, actual, case.experts)
        trials.append(
            Trial(
                case=case.id,
                entry=entry.value,
                format=name(case),
                fault=None if fault is None else fault.name,
                margin=float("inf") if comparison.margin is None else comparison.margin,
                size=_size(answer, actual),
                outside=comparison.outcome is not Outcome.PASS,
                factor=bool(measured.flagged()),
            )
        )
        if fault is None:
            expert, channel = target(answer.contributions, answer.routing)
            experts, channels = measured.expert.smallest(), measured.channel.smallest()
            resolution = Resolution(
                format=name(case),
                expert=float(experts[expert]),
                channel=float(channels[expert, channel]),
                median_expert=float(experts.nanmedian()),
                median_channel=float(channels.nanmedian()),
            )
    assert resolution is not None
    return Shown(tuple(trials), resolution)


def _size(answer: Answer, actual: torch.Tensor) -> float:
    error = actual.to(torch.float64) - answer.expected
    radius = torch.where(error > 0, answer.high - answer.expected, answer.expected - answer.low)
    size = error.abs() / (radius + half_gaps(answer.expected, actual.dtype)[1])
    return float(size.nan_to_num(torch.inf, torch.inf).max())


def smoke(backend: Backend) -> tuple[Pair, ...]:
    """Smoke pairs but those of packed formats that the lane refuses: nothing says what would run."""
    return tuple(pair for pair in pairs(Level.SMOKE) if not is_packed(pair[0]) or declared_refusal(*pair, backend) is None)


def sample(backend: Backend, per_fault: int) -> dict[Pair, tuple[Fault, ...]]:
    """Smoke pairs spread evenly over those each fault applies to, ``per_fault`` of each; the same every time."""
    where: dict[Fault, list[Pair]] = defaultdict(list)
    for pair in smoke(backend):
        for fault in faults_of(pair, backend):
            where[fault].append(pair)
    chosen: dict[Pair, list[Fault]] = defaultdict(list)
    for number, fault in enumerate(Fault):
        among = where[fault]
        step = max(1, len(among) // per_fault)
        for pair in among[number % step :: step][:per_fault]:
            chosen[pair].append(fault)
    return {pair: tuple(faults) for pair, faults in chosen.items()}


def table(backend: Backend) -> Group:
    """Every smoke pair with every fault that applies, as tables; minutes of work, on all cores."""
    every = smoke(backend)
    with ProcessPoolExecutor(cores(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        work = pool.map(partial(show, backend=backend), every, chunksize=4)
        shown = list(track(work, "sensitivity", total=len(every), console=Console(stderr=True), transient=True))
    return render([trial for each in shown for trial in each.trials], [each.resolution for each in shown])


def render(trials: Sequence[Trial], resolutions: Sequence[Resolution]) -> Group:
    """Tables of trials and of smallest flagged gains."""
    return Group(_faults(trials), _honest(trials), _gains(resolutions))


def missed(trials: Iterable[Trial]) -> Iterator[Trial]:
    """Trials that went the wrong way: a fault unseen, or an honest result accused."""
    return (trial for trial in trials if trial.seen == (trial.fault is None))


def _kind(trial: Trial) -> str:
    kinds = {Format.INT8.value: "INT8", Format.E4M3FN.value: "FP8"}
    return kinds.get(trial.format.partition(" ")[0], "unquantized")


def _faults(trials: Sequence[Trial]) -> Table:
    kinds = ("INT8", "FP8", "unquantized")
    title = "Faults caught of those injected; worst error over allowed (radius and half an output gap): smallest, median"
    found = Table(Column("fault", no_wrap=True), title=title, title_justify="left")
    for kind in kinds:
        found.add_column(kind, justify="right")
    for fault in Fault:
        cells = []
        for kind in kinds:
            these = [trial for trial in trials if trial.fault == fault.name and _kind(trial) == kind]
            sizes = sorted(trial.size for trial in these)
            seen = sum(trial.seen for trial in these)
            cells.append(f"{seen}/{len(these)}  {sizes[0]:.2g} {median(sizes):.2g}" if these else "")
        found.add_row(fault.name, *cells)
    return found


def _honest(trials: Sequence[Trial]) -> Table:
    found = Table("format", "pairs", "accused", "median margin", "largest", title="The honest fake", title_justify="left")
    by_format = defaultdict(list)
    for trial in trials:
        if trial.fault is None:
            by_format[trial.format].append(trial)
    for fmt, these in sorted(by_format.items()):
        margins = [trial.margin for trial in these]
        found.add_row(fmt, str(len(these)), str(sum(t.seen for t in these)), f"{median(margins):.3f}", f"{max(margins):.3f}")
    return found


def _gains(resolutions: Sequence[Resolution]) -> Table:
    found = Table(
        "format",
        "expert: median pair",
        "worst pair",
        "channel: median pair",
        "worst pair",
        "any expert",
        "any channel",
        title="Smallest |gain - 1| flagged, for the expert and channel with the largest share; and the median of all of them",
        title_justify="left",
    )
    by_format = defaultdict(list)
    for each in resolutions:
        by_format[each.format].append(each)
    for fmt, these in sorted(by_format.items()):
        expert, channel = [each.expert for each in these], [each.channel for each in these]
        everyone, everywhere = median(each.median_expert for each in these), median(each.median_channel for each in these)
        found.add_row(
            fmt, *(f"{value:.2g}" for value in (median(expert), max(expert), median(channel), max(channel), everyone, everywhere))
        )
    return found
