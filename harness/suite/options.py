"""The options of a run, validated once: the same for pytest, its workers and ``moediff run``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cases.case import Entry, Level
from harness import architectures
from harness.backends import SPECS, Backend, UnknownBackend, has_entry
from harness.exits import Misuse, Unavailable
from harness.gpus import default_backend, visible_gpus
from harness.pairs import Pair, Related, parse_entry, parse_expression, parse_level, relate, select
from harness.preflight import why_not
from harness.recipes import written
from harness.suite import subjects

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

OUT = Path("reports/out")
RESUME_HELP = "the directory of an earlier run, which is continued there: what has a record is not run again"
ARCHITECTURE_HELP = (
    f"answer as this GPU on a CPU: {', '.join(architectures.ARCHITECTURES)}; the interpreter lane runs, every other is chosen and loaded"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run, on what."""

    backend: Backend
    level: Level
    cases: tuple[str, ...]  # ids; empty: the level
    entry: Entry | None
    subject: str  # "vllm", "fake" or "fake:FAULT"
    records: Path
    architecture: str = ""  # the GPU that the CPU answers as; empty: none was asked for
    resume: Path | None = None  # the directory of a run that is continued
    whole: bool  # nothing but the level was asked for: then entries of the ledger that match no pair are told

    @property
    def machine(self) -> Backend:
        """The lane whose machine the run needs: without a GPU, where the CPU answers as one."""
        return Backend.INTERPRETER if self.architecture else self.backend

    @property
    def loads_only(self) -> bool:
        """Whether kernels that need a GPU are chosen and loaded for one that is not here."""
        return self.machine is not self.backend and SPECS[self.backend].needs_gpu

    def pairs(self) -> tuple[Pair, ...]:
        """In the generator's order, through the entries the backend has, where the subject's fault applies.

        Raises:
            Misuse: there is none; Unavailable, where no reference is written for a backend that cannot run here either.
        """
        chosen = select(self.level, self.cases, self.entry)
        pairs = tuple(pair for pair in chosen if has_entry(pair.entry, self.backend) and (pair.entry is Entry.LAYER or not self.loads_only))
        if not pairs:
            raise Misuse(f"backend '{self.backend}' has no entry '{chosen[0].entry}'; leave --entry out, or use --backend triton")
        pairs = tuple(pair for pair in pairs if self.loads_only or written(pair.case, pair.entry, self.backend))
        if not pairs:
            if self.subject == subjects.VLLM and isinstance(reason := why_not(self.machine), Unavailable):
                raise reason  # as a run of the level says
            raise Misuse(f"no reference is written yet for what backend '{self.backend}' runs there; use --backend triton, or interpreter")
        shown = tuple(pair for pair in pairs if self._why_left_out(pair) is None)
        if not shown:
            raise Misuse(f"{self.subject} applies to none of these pairs: {self._why_left_out(pairs[0])}; name other cases, or a level")
        return shown

    def related(self) -> tuple[Related, ...]:
        """The exact relations, after the pairs. Raises Misuse."""
        related = () if self.loads_only else relate(self.level, self.cases, self.entry, self.backend)
        return tuple(each for each in related if self._why_left_out(each.pair) is None)

    def left_out(self) -> int:
        """How many pairs the subject's fault does not apply to."""
        chosen = [pair for pair in select(self.level, self.cases, self.entry) if has_entry(pair.entry, self.backend)]
        return sum(self._why_left_out(pair) is not None for pair in chosen)

    def unwritten(self) -> int:
        """How many pairs the backend runs by kernels for which there is no reference yet."""
        chosen = [pair for pair in select(self.level, self.cases, self.entry) if has_entry(pair.entry, self.backend)]
        return 0 if self.loads_only else sum(not written(pair.case, pair.entry, self.backend) for pair in chosen)

    def _why_left_out(self, pair: Pair) -> str | None:
        return subjects.why_not(self.subject, pair, self.backend)

    @classmethod
    def parse(
        cls,
        *,
        backend: str | None,
        level: str,
        cases: Iterable[str],
        entry: str | None,
        subject: str,
        records: str | None,
        expression: str,
        selected: bool = False,
        architecture: str | None = None,
        resume: str | None = None,
    ) -> Options:
        """From what was typed; ``selected``: fewer tests were asked for in another way. Raises Misuse with a sentence for what is wrong."""
        named = tuple(dict.fromkeys(cases))
        run = None if resume is None else parse_run(resume).absolute()
        into = parse_records(str(OUT) if records is None else records).absolute()
        if run is not None and records is not None and run.parent != into:
            raise Misuse(f"a run that is continued keeps its directory '{resume}': leave --records out, or run without --resume")
        narrowed = bool(named or entry or selected) | bool(parse_expression(expression))
        found = cls(
            backend=Backend.INTERPRETER if architecture and not backend else parse_backend(backend),
            architecture=architectures.parse(architecture).name if architecture else "",
            level=parse_level(level),
            cases=named,
            entry=None if entry is None else parse_entry(entry),
            subject=subjects.parse(subject),
            records=into,
            resume=run,
            whole=not narrowed,
        )
        if not found.whole or subject != subjects.VLLM:
            found.pairs()
        return found

    @classmethod
    def of(cls, config: pytest.Config) -> Options:
        """Raises Misuse."""
        workers = config.getoption("numprocesses", None)  # None in xdist's workers; "auto" while xdist asks how many that is
        if isinstance(workers, int) and workers < 0:
            raise Misuse(f"-n takes a number of worker processes or auto, not {workers}")
        return cls.parse(
            backend=config.getoption("backend"),
            level=config.getoption("level"),
            cases=config.getoption("case"),
            entry=config.getoption("entry"),
            subject=config.getoption("subject"),
            records=config.getoption("records"),
            architecture=config.getoption("architecture"),
            resume=config.getoption("resume"),
            expression=config.getoption("keyword"),
            selected=any("::" in argument for argument in config.args) or any(map(config.getoption, ("markexpr", "deselect"))),
        )


def runs(pair: Pair, backend: Backend) -> bool:
    """Whether a run of the lane asks for the pair: it can be entered there, and there is a reference for what runs, or it is refused."""
    return has_entry(pair.entry, backend) and written(pair.case, pair.entry, backend)


def parse_backend(text: str | None) -> Backend:
    """None: the lane of this machine. Raises Misuse for an unknown backend."""
    if text is None:
        return default_backend(visible_gpus())
    try:
        return Backend.parse(text)
    except UnknownBackend as error:
        raise Misuse(str(error)) from None


def parse_records(text: str) -> Path:
    """The directory for records. Raises Misuse."""
    if not text.strip():
        raise Misuse(f"--records names no directory; leave it out for {OUT}")
    return Path(text)


def parse_run(text: str) -> Path:
    """The directory of a run. Raises Misuse."""
    if not list(Path(text).glob("worker-*.jsonl")):
        raise Misuse(f"'{text}' holds no records of a run; --resume takes a directory that a run made below --records")
    return Path(text)


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
    group.addoption("--architecture", default=os.environ.get(architectures.VARIABLE), help=ARCHITECTURE_HELP)
    group.addoption("--level", default=Level.SMOKE.value, help=f"{', '.join(Level)}; default: smoke")
    group.addoption("--case", action="append", default=[], metavar="ID", help="this case instead of a level; may be repeated")
    group.addoption("--entry", default=None, help=f"only through this entry: {', '.join(Entry)}")
    group.addoption("--subject", default="vllm", help="vllm; or fake[:FAULT], the harness without vLLM, with one fault injected")
    group.addoption("--resume", default=None, metavar="RUN", help=RESUME_HELP)
    group.addoption("--records", default=None, metavar="DIR", help=f"where records are written; default: {OUT}")
