"""The options of a run, validated once: the same for pytest, its workers and ``moediff run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cases.case import Entry, Level
from harness.backends import Backend, UnknownBackend, has_entry
from harness.exits import Misuse
from harness.gpus import default_backend, visible_gpus
from harness.pairs import Pair, Related, parse_entry, parse_expression, parse_level, relate, select

if TYPE_CHECKING:
    import pytest

OUT = Path("reports/out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run, on what."""

    backend: Backend
    level: Level
    cases: tuple[str, ...]  # ids; empty: the level
    entry: Entry | None
    subject: str  # "vllm", "fake" or "fake:FAULT"
    records: Path

    def pairs(self) -> tuple[Pair, ...]:
        """In the generator's order, through the entries the backend has. Raises Misuse."""
        chosen = select(self.level, self.cases, self.entry)
        pairs = tuple(pair for pair in chosen if has_entry(pair.entry, self.backend))
        if not pairs:
            raise Misuse(f"backend '{self.backend}' has no entry '{chosen[0].entry}'; leave --entry out, or use --backend triton")
        return pairs

    def related(self) -> tuple[Related, ...]:
        """The exact relations, after the pairs. Raises Misuse."""
        return relate(self.level, self.cases, self.entry, self.backend)

    @classmethod
    def of(cls, config: pytest.Config) -> Options:
        """Raises Misuse with a sentence for the option that is wrong."""
        entry, records = config.getoption("entry"), config.getoption("records")
        parse_expression(config.getoption("keyword"))
        return cls(
            backend=parse_backend(config.getoption("backend")),
            level=parse_level(config.getoption("level")),
            cases=tuple(config.getoption("case")),
            entry=None if entry is None else parse_entry(entry),
            subject=config.getoption("subject"),
            records=Path(records).absolute(),
        )


def parse_backend(text: str | None) -> Backend:
    """None: the lane of this machine. Raises Misuse for an unknown backend."""
    if text is None:
        return default_backend(visible_gpus())
    try:
        return Backend.parse(text)
    except UnknownBackend as error:
        raise Misuse(str(error)) from None


def made(records: Path) -> Path:
    """The directory for records, made if it is not there. Raises Misuse."""
    try:
        records.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Misuse(f"records cannot be written to {records} ({error.strerror}); name a directory that can be with --records") from None
    return records


def add_to(parser: pytest.Parser) -> None:
    """The options of the pairs, for pytest."""
    group = parser.getgroup("moediff", "the (case, entry) pairs of harness/suite")
    group.addoption("--backend", default=None, help="lane to run on; default: the one this machine can run")
    group.addoption("--level", default=Level.SMOKE.value, help=f"{', '.join(Level)}; default: smoke")
    group.addoption("--case", action="append", default=[], metavar="ID", help="this case instead of a level; may be repeated")
    group.addoption("--entry", default=None, help=f"only through this entry: {', '.join(Entry)}")
    group.addoption("--subject", default="vllm", help="vllm; or fake[:FAULT], the harness without vLLM, with one fault injected")
    group.addoption("--records", default=str(OUT), metavar="DIR", help=f"where records are written; default: {OUT}")
