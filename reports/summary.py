"""The end of a run on a terminal, from records only: outcomes, upstream faults confirmed, what is new, where the records are."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.verdict import Outcome
from reports.records import Record, Status

_SHOWN = 20  # news shown in full; the rest are in the records


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


def render(records: Sequence[Record], stale: Sequence[str] = (), *, where: str, width: int = 120, color: bool = False) -> str:
    """The whole summary as text; ``stale`` are sentences about ledger entries that matched nothing."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None, highlight=False)
    console.print(_outcomes(records))
    for line in (*_faults(records), *_news(records, stale), *_where(records, where)):
        console.print(line, soft_wrap=True)  # ids and paths stay in one piece
    return out.getvalue().rstrip()


def _outcomes(records: Sequence[Record]) -> Table:
    table = Table(title=f"{len(records)} pairs (case, entry) on {', '.join(sorted({record.backend for record in records}))}")
    table.add_column("outcome")
    for heading in ("pairs", "as expected", "known upstream", "new"):
        table.add_column(heading, justify="right")
    for outcome, counts in by_outcome(records).items():
        news = counts[Status.NEW]
        table.add_row(
            outcome, str(counts.total()), str(counts[Status.CLEAN]), str(counts[Status.KNOWN]), Text(str(news), "bold red" if news else "")
        )
    return table


def _faults(records: Sequence[Record]) -> list[Text]:
    found = confirmed(records)
    if not found:
        return []
    lines = [Text("Upstream faults confirmed (cases/known_issues.toml)", "bold")]
    for entry, those in found.items():
        signatures = ", ".join(sorted({record.verdict.signature for record in those if record.verdict.signature})[:3])
        lines.append(Text(f"  {entry}: {len(those)} pairs · {signatures or those[0].verdict.outcome} · {those[0].link}"))
    return lines


def _news(records: Sequence[Record], stale: Sequence[str]) -> list[Text]:
    news = [record for record in records if record.status is Status.NEW]
    if not news and not stale:
        return [Text("Nothing new: every pair ended as the ledger says", "green")]
    lines = [Text(f"New: {len(news)} pairs", "bold red")] if news else []
    lines += [Text(f"  {record.verdict.outcome} {record.pair}: {_why(record)}") for record in news[:_SHOWN]]
    if len(news) > _SHOWN:
        lines.append(Text(f"  and {len(news) - _SHOWN} more in the records"))
    return [*lines, *(Text(sentence, "bold red") for sentence in stale)]


def _why(record: Record) -> str:
    if record.ledger:  # the ledger's own sentence: stopped failing, or fails differently
        return record.news.strip().partition("\n")[0]
    return f"{record.verdict.claim} ({record.verdict.signature})" if record.verdict.signature else record.verdict.claim


def _where(records: Sequence[Record], where: str) -> list[Text]:
    margins = [record.verdict.margin for record in records if record.verdict.outcome is Outcome.PASS and record.verdict.margin is not None]
    spent = [sum(record.seconds.values()) for record in records if record.seconds]
    peak = max((record.peak_rss_bytes for record in records), default=0)
    parts = [f"median margin of passing pairs {median(margins):.3f}"] if margins else []
    parts += [f"median pair {median(spent):.2f} s"] if spent else []
    parts += [f"peak worker memory {peak / 2**30:.2f} GiB"] if peak else []
    return [Text(" · ".join(parts)), Text(f"Records: {where}")]
