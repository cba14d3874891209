"""One page of a run, from records only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from reports.records import Record, Status, writing
from reports.summary import by_outcome, confirmed, counted, unreasoned

PAGE = "index.html"


def render(records: Sequence[Record]) -> str:
    """The page as text. Everything in it is escaped."""
    templates = Environment(
        loader=PackageLoader("reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("run.html").render(
        records=records,
        counted=counted,
        outcomes=by_outcome(records),
        statuses=list(Status),
        confirmed=confirmed(records),
        unreasoned=unreasoned(records),
        news=[record for record in records if record.status is Status.NEW],
        environment=records[0].environment if records else {},
        backends=sorted({record.backend for record in records}),
    )


def write(directory: Path, records: Sequence[Record]) -> Path:
    """Writes ``index.html`` beside the records and says where."""
    path = directory / PAGE
    with writing(path):
        path.write_text(render(records), encoding="utf-8", errors="backslashreplace")  # a lone surrogate in what vLLM said
    return path
