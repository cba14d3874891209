"""Format x origin x backend, for each architecture: what ran, what loads, what vLLM refused and why, what failed. From records only."""

from __future__ import annotations

import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.verdict import UNREASONED, Outcome
from reports.records import KINDS, Record, Status, writing

FILE = "matrix.json"
FIELDS = ("activation", "origin", "checkpoint", "weight", "weight_scale", "act_scale")  # of a case, which a row is made of
LOAD = "load"  # relation of a record for which a layer was loaded and nothing ran
_NOT_GATED, _GATED_OR_NOT = ", not gated", ", gated or not"
_NOBODYS = "fused_experts"  # class of a layer whose method calls the legacy function itself
_LONG = 220  # characters of a reason that are shown
_LEGEND = """ran: compared, and passed; loads: chosen, loaded and converted, nothing ran; loads*: as far as an operator that needs the GPU
no: refused as declared, in vLLM's words; no!: refused without a reason; fault: failed as the ledger says; NEW: anything else
numbers are of what was asked, brackets say why"""


class State(StrEnum):
    """What became of the pairs of a cell, worst first."""

    NEW = "NEW"  # failed, and the ledger does not know it; or did not fail where it must
    FAULT = "fault"  # failed as a ledger entry says
    RAN = "ran"  # and passed
    LOADS = "loads"  # chosen, loaded and converted; nothing ran
    PARTLY = "loads*"  # the same as far as an operator that needs the GPU
    BARE = "no!"  # refused as declared, by an assertion or an error of the code below: no reason is given
    REFUSED = "no"  # refused as declared, in vLLM's words


_REFUSED = (State.BARE, State.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Every record of one way of quantizing, on one backend of one architecture."""

    way: str
    origin: str
    backend: str
    architecture: str
    kind: str  # of its records: pairs, or what else was asked of them
    states: dict[State, int]
    reasons: tuple[str, ...] = ()  # vLLM's words, the ledger's entry or what is new; most frequent first
    classes: tuple[str, ...] = ()  # experts that ran, or were chosen
    cases: tuple[str, ...] = field(default=())  # pairs, as pytest shows them

    @property
    def worst(self) -> State:
        """What the cell shows first."""
        return next(state for state in State if state in self.states)


def architecture(record: Record) -> str:
    """What the interpreter platform answered as, the GPU, or "cpu"."""
    here = record.environment
    return here.get("architecture") or here.get("gpus") or "cpu"


def way(record: Record) -> str:
    """How weights and activations are quantized and where the checkpoint comes from: ``e4m3fn channel x dyntoken, ct``; not gated said."""
    fields = record.fields
    gated = "" if not str(fields["activation"]).endswith("_no_mul") else _NOT_GATED
    if fields["origin"] == "unquantized":
        return f"unquantized{gated}"
    stored = "online" if fields["origin"] == "online" else fields["checkpoint"]
    return f"{fields['weight']} {fields['weight_scale']} x {fields['act_scale']}, {stored}{gated}"


def state(record: Record) -> State:
    """Of one record."""
    if record.status is Status.NEW:
        return State.NEW
    if record.status is Status.KNOWN:
        return State.FAULT
    if record.verdict.outcome is Outcome.UNSUPPORTED:
        return State.BARE if record.verdict.signature == UNREASONED else State.REFUSED
    if record.relation == LOAD:
        return State.PARTLY if "stops_at" in record.ran else State.LOADS
    return State.RAN


def _reason(record: Record) -> str:
    match state(record):
        case State.REFUSED:
            return record.verdict.detail
        case State.BARE:
            return f"{record.verdict.claim}; {record.verdict.detail.strip().partition(chr(10))[0] or 'no text'}"
        case State.FAULT:
            return f"{record.ledger}: {record.verdict.signature or record.verdict.outcome}"
        case State.NEW:
            return record.verdict.claim if not record.ledger else record.news.partition("\n")[0]
        case State.PARTLY:
            return f"as far as {record.ran['stops_at']}"
        case _:
            return ""


def cells(records: Iterable[Record]) -> tuple[Cell, ...]:
    """One for each way, backend, architecture and kind that any record speaks of."""
    groups: dict[tuple[str, str, str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[way(record), str(record.fields["origin"]), record.backend, architecture(record), record.kind].append(record)
    return tuple(_cell(key, group) for key, group in groups.items())


def _cell(key: tuple[str, str, str, str, str], group: Sequence[Record]) -> Cell:
    counts = Counter(state(record) for record in group)
    reasons = Counter(reason for record in group if (reason := _reason(record)))
    ran = Counter(str(name) for record in group if (name := record.ran.get("experts_class")))
    return Cell(
        way=key[0],
        origin=key[1],
        backend=key[2],
        architecture=key[3],
        kind=key[4],
        states={each: counts[each] for each in State if each in counts},
        reasons=tuple(reason for reason, _ in reasons.most_common()),
        classes=tuple(name for name, _ in ran.most_common()),
        cases=tuple(record.pair for record in group),
    )


def write(directory: Path, found: Sequence[Cell]) -> Path:
    """``matrix.json`` in ``directory``: a list of cells, each with its counts, reasons, classes and pairs."""
    path = directory / FILE
    with writing(path):
        path.write_text(json.dumps([asdict(cell) for cell in found], indent=1) + "\n", encoding="utf-8")
    return path


def render(found: Sequence[Cell], *, width: int = 160, color: bool = False) -> str:
    """A table for each architecture and kind of record, ways down and backends across, and below it the reasons by number."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None, highlight=False)
    for name in dict.fromkeys(cell.architecture for cell in found):
        for kind in KINDS:
            if mine := [cell for cell in found if (cell.architecture, cell.kind) == (name, kind)]:
                _draw(console, f"{name}: format × origin × backend, {kind}s", mine)
    return out.getvalue().rstrip()


def _draw(console: Console, title: str, found: Sequence[Cell]) -> None:
    numbers: dict[str, int] = {}
    at = {(cell.way, cell.backend): cell for cell in found}
    backends = list(dict.fromkeys(cell.backend for cell in found))
    refused = {cell.backend for cell in found if cell.worst in _REFUSED and any(cell.reasons)}
    never = [each for each in backends if each in refused and all(_not_its_own(cell) for cell in found if cell.backend == each)]
    shown = [backend for backend in backends if backend not in never]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("weights x activations, checkpoint", no_wrap=True)
    for backend in shown:
        table.add_column(backend.replace("-", " "))
    for label, texts in _rows(at, shown, numbers):
        table.add_row(label, *texts)
    console.print(table)
    console.print(_LEGEND)
    for reason, number in numbers.items():
        console.print(Text(f"[{number}] {reason}"), soft_wrap=True)
    for backend in never:
        mine = Counter(_short(reason) for cell in found if cell.backend == backend for reason in cell.reasons)
        console.print(Text(f"{backend} is refused throughout, most often: {mine.most_common(1)[0][0]}"), soft_wrap=True)
    console.print()


def _not_its_own(cell: Cell) -> bool:
    """Refused, or run by the legacy function, which no backend decides."""
    return cell.worst in _REFUSED or (cell.worst in (State.LOADS, State.RAN) and cell.classes == (_NOBODYS,))


def _rows(at: Mapping[tuple[str, str], Cell], backends: Sequence[str], numbers: dict[str, int]) -> Iterator[tuple[str, list[Text]]]:
    """Label and cells; gated and not gated are one row where nothing differs."""
    ways = sorted({way for way, _ in at}, key=lambda text: ("unquantized" not in text, text))
    for label in ways:
        plain = label.removesuffix(_NOT_GATED)
        other = plain if label != plain else f"{plain}{_NOT_GATED}"
        texts, others = ([_text(at.get((each, backend)), numbers) for backend in backends] for each in (label, other))
        if other in ways and texts == others:
            if label == plain:
                yield f"{plain}{_GATED_OR_NOT}", texts
        else:
            yield label, texts


def _text(cell: Cell | None, numbers: dict[str, int]) -> Text:
    if cell is None:
        return Text("")
    style = {State.NEW: "bold red", State.FAULT: "yellow", State.BARE: "yellow", State.REFUSED: "dim"}
    parts = [f"{each} {count}" if sum(cell.states.values()) > 1 else str(each) for each, count in cell.states.items()]
    whys = sorted({numbers.setdefault(_short(reason), len(numbers) + 1) for reason in cell.reasons})
    why = f" [{','.join(str(number) for number in whys)}]" if whys else ""
    return Text(f"{', '.join(parts)}{why}", style.get(cell.worst, "green"))


def _short(reason: str) -> str:
    """The first line, without the keys that differ from case to case."""
    first = re.sub(r"QuantKey\(.*?symmetric\)", "…", reason.strip().partition("\n")[0])
    return first if len(first) <= _LONG else f"{first[:_LONG]}…"
