"""Which exact relation catches which fault: every fault of faults.py put into the fake subject, in every smoke lattice pair it applies to.

SCALE_VIEWS is not among them: what is handed over in another form is a matter of the real subject, and the fake takes numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from cases.case import Entry, Level, MoECase
from cases.lattice_pairs import lattice_pairs
from harness.backends import Backend, declared_refusal
from harness.exact import BUILDERS, Drive
from harness.faults import Fault, applicable, why_not
from harness.gpus import cores
from harness.recipes import recipe
from harness.relations import Relation, asked
from harness.relations_check import Setting, check
from harness.subject.fake import FakeSubject

Pair = tuple[MoECase, Entry]
RELATIONS = tuple(relation for relation in Relation if relation is not Relation.SCALE_VIEWS)


@dataclass(frozen=True, slots=True)
class Seen:
    """Whether one relation of one pair broke under one fault; ``fault`` None: under honesty."""

    case: str
    entry: str
    fault: str | None
    relation: Relation
    caught: bool


def pairs(backend: Backend) -> tuple[Pair, ...]:
    """The smoke lattice pairs that run."""
    return tuple(pair for pair in lattice_pairs(Level.SMOKE) if declared_refusal(*pair, backend) is None)


def ask(
    pair: Pair, backend: Backend, faults: Iterable[Fault | None] | None = None, relations: Sequence[Relation] = RELATIONS
) -> tuple[Seen, ...]:
    """Every relation asked of the pair, under honesty and under each of ``faults`` (all that apply)."""
    start = Setting.of(*pair, backend)
    if faults is None:
        faults = (None, *(fault for fault in Fault if applicable(fault, pair[0], start.recipe)))
    variants = {relation: tuple(BUILDERS[relation](start)) for relation in asked(*pair, backend) if relation in relations}
    found = []
    for fault in faults:
        drive = Drive(FakeSubject(fault, backend))
        for relation, every in variants.items():
            broke = any(check(relation, each, drive.before(each, start), drive.after(each, start)) is not None for each in every)
            found.append(Seen(pair[0].id, pair[1].value, None if fault is None else fault.name, relation, broke))
    return tuple(found)


def unasked(fault: Fault, backend: Backend) -> tuple[str, ...]:
    """Why no smoke lattice pair can show the fault: the reasons of faults.py; none when some pair can."""
    reasons = {why_not(fault, case, recipe(case, entry, backend)) for case, entry in pairs(backend)}
    return () if None in reasons else tuple(sorted(reason for reason in reasons if reason is not None))


def table(backend: Backend) -> Table:
    """All of it, on all cores: minutes."""
    every = pairs(backend)
    with ProcessPoolExecutor(cores(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        work = pool.map(partial(ask, backend=backend), every)
        found = list(track(work, "exact relations", total=len(every), console=Console(stderr=True), transient=True))
    return render([each for seen in found for each in seen], backend)


def render(found: Sequence[Seen], backend: Backend) -> Table:
    """Faults down, relations across: in how many of the pairs in which both apply the fault broke the relation."""
    numbers = {relation: str(number) for number, relation in enumerate(RELATIONS, 1)}
    legend = ", ".join(f"{number} {relation}" for relation, number in numbers.items())
    title = f"Faults caught by exact relations, of the pairs in which both apply. Relations: {legend}; any: at least one of them"
    columns = (Column("fault", no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in (*numbers.values(), "any")))
    drawn = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    tried: Counter[tuple[str | None, Relation]] = Counter()
    caught: Counter[tuple[str | None, Relation]] = Counter()
    whole: dict[str | None, dict[tuple[str, str], bool]] = defaultdict(dict)
    for seen in found:
        tried[seen.fault, seen.relation] += 1
        caught[seen.fault, seen.relation] += seen.caught
        at = seen.case, seen.entry
        whole[seen.fault][at] = whole[seen.fault].get(at, False) or seen.caught
    for fault in (None, *Fault):
        name = None if fault is None else fault.name
        cells = [f"{caught[name, each]}/{tried[name, each]}" if tried[name, each] else "" for each in RELATIONS]
        drawn.add_row(name or "none: an honest kernel", *cells, f"{sum(whole[name].values())}/{len(whole[name])}" if whole[name] else "")
    notes = [f"{fault.name}: none can, {'; '.join(reasons)}" for fault in Fault if (reasons := unasked(fault, backend))]
    drawn.caption, drawn.caption_justify = "\n".join(notes), "left"
    return drawn
