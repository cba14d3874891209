"""The end of a run on a terminal, from records only: outcomes, upstream faults confirmed, what is new, where the records are."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.verdict import UNREASONED, Outcome
from reports.records import KINDS, Record, Status

_SHOWN = 20  # news shown in full; the rest are in the records
_REASONS = 8  # of declared refusals, the most frequent


def by_outcome(records: Iterable[Record]) -> dict[str, Counter[Status]]:
    """Outcome -> how many of each status, in the order of Outcome, present outcomes only."""
    counts: dict[Outcome, Counter[Status]] = defaultdict(Counter)
    for record in records:
        counts[record.verdict.outcome][record.status] += 1
    return {outcome.value: counts[outcome] for outcome in Outcome if outcome in counts}


def confirmed(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Ledger entry -> the records that failed exactly as it says."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.status is Status.KNOWN:
            found[record.ledger].append(record)
    return dict(sorted(found.items()))


def unreasoned(records: Iterable[Record]) -> dict[str, list[Record]]:
    """What was refused -> the records in which an error stands where vLLM's reason should: findings too. A fake says nothing of vLLM."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.verdict.outcome is Outcome.UNSUPPORTED and record.verdict.signature == UNREASONED and not record.fake:
            found[record.verdict.claim].append(record)
    return dict(sorted(found.items()))


def counted(records: Iterable[Record]) -> str:
    """``3 pairs, 1 exact relation``: how many of each kind, kinds that are there only."""
    counts = Counter(record.kind for record in records)
    return ", ".join(f"{counts[kind]} {kind}{'s' * (counts[kind] != 1)}" for kind in KINDS if counts[kind]) or "nothing"


def render(
    records: Sequence[Record],
    stale: Sequence[str] = (),
    *,
    where: str,
    width: int = 120,
    color: bool = False,
    unfinished: int = 0,
    left_out: str = "",
) -> str:
    """The whole summary as text.

    stale: sentences about ledger entries that matched nothing; unfinished: how many results an interrupted run still owed;
    left_out: what was not run, by design, and why.
    """
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None, highlight=False)
    console.print(_outcomes(records))
    for line in (
        *_faults(records),
        *_refused(records),
        *_declined(records),
        *_news(records, stale, unfinished),
        *_where(records, where, left_out),
    ):
        console.print(line, soft_wrap=True)  # ids and paths stay in one piece
    return out.getvalue().rstrip()


def _outcomes(records: Sequence[Record]) -> Table:
    lanes = ", ".join(sorted({record.backend for record in records}))
    loaded = sorted({str(record.ran["architecture"]) for record in records if "architecture" in record.ran})
    only = f", as {', '.join(loaded)}: loaded and converted, nothing ran" if loaded else ""
    table = Table(title=f"{counted(records)} on {lanes}{only}", title_justify="left")
    table.add_column("outcome")
    kinds = [kind for kind in KINDS if any(record.kind == kind for record in records)]
    for heading in (*(f"{kind}s" for kind in kinds), "as expected", "known upstream", "new"):
        table.add_column(heading, justify="right")
    of_kind = Counter((record.verdict.outcome.value, record.kind) for record in records)
    for outcome, counts in by_outcome(records).items():
        news = Text(str(counts[Status.NEW]), "bold red" if counts[Status.NEW] else "")
        numbers = [*(of_kind[outcome, kind] for kind in kinds), counts[Status.CLEAN], counts[Status.KNOWN]]
        table.add_row(outcome, *map(str, numbers), news)
    return table


def _faults(records: Sequence[Record]) -> list[Text]:
    found = confirmed(records)
    if not found:
        return []
    lines = [Text("Upstream faults confirmed (cases/known_issues.toml)", "bold")]
    for entry, those in found.items():
        signatures = ", ".join(sorted({record.verdict.signature for record in those if record.verdict.signature})[:3])
        lines.append(Text(f"  {entry}: {counted(those)} · {signatures or those[0].verdict.outcome} · {those[0].link}"))
    return lines


def _refused(records: Sequence[Record]) -> list[Text]:
    found = unreasoned(records)
    lines = [Text("Upstream refuses without giving a reason (harness/refusals*.py)", "bold")] if found else []
    for claim, those in found.items():
        says = Counter(record.verdict.detail.strip().partition("\n")[0] for record in those)
        lines.append(Text(f"  {claim.partition(': ')[2]}: {counted(those)} · {says.most_common(1)[0][0]}"))
    return lines


def _declined(records: Sequence[Record]) -> list[Text]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.verdict.outcome is Outcome.UNSUPPORTED and record.verdict.signature != UNREASONED:
            found[record.verdict.claim.partition(": ")[2] or record.verdict.claim].append(record)
    lines = [Text("Refused by design, as declared", "bold")] if found else []
    often = sorted(found.items(), key=lambda each: -len(each[1]))
    lines += [Text(f"  {reason}: {counted(those)}") for reason, those in often[:_REASONS]]
    if len(often) > _REASONS:
        lines.append(Text(f"  and {len(often) - _REASONS} reasons more in the records"))
    return lines


def _news(records: Sequence[Record], stale: Sequence[str], unfinished: int) -> list[Text]:
    news = [record for record in records if record.status is Status.NEW]
    if not news and not stale:
        which = (
            "Nothing new in what was run; " + f"{unfinished} results are missing"
            if unfinished
            else "Nothing new: all ended as the ledger says"
        )
        return [Text(which, "" if unfinished else "green")]
    lines = [Text(f"New: {counted(news)}", "bold red")] if news else []
    lines += [Text(f"  {record.verdict.outcome} {record.pair}: {_why(record)}") for record in news[:_SHOWN]]
    if len(news) > _SHOWN:
        lines.append(Text(f"  and {len(news) - _SHOWN} more in the records"))
    return [*lines, *(Text(sentence, "bold red") for sentence in stale)]


def _why(record: Record) -> str:
    if record.ledger:  # the ledger's own sentence: stopped failing, or fails differently
        return record.news.strip().partition("\n")[0]
    return f"{record.verdict.claim} ({record.verdict.signature})" if record.verdict.signature else record.verdict.claim


def _where(records: Sequence[Record], where: str, left_out: str) -> list[Text]:
    pairs = [record for record in records if record.kind == KINDS[0]]
    margins = [record.verdict.margin for record in pairs if record.verdict.outcome is Outcome.PASS and record.verdict.margin is not None]
    spent = [sum(record.seconds.values()) for record in pairs if record.seconds]
    peak = max((record.peak_rss_bytes for record in records), default=0)
    parts = [f"median margin of passing pairs {median(margins):.3f}"] if margins else []
    parts += [f"median pair {median(spent):.2f} s"] if spent else []
    parts += [f"peak worker memory {peak / 2**30:.2f} GiB"] if peak else []
    lines = [f"Left out: {left_out}"] if left_out else []
    return [*map(Text, lines), Text(" · ".join(parts)), Text(f"Records: {where}")]
