"""The ledger of known upstream faults: cases/known_issues.toml, read strictly.

An entry names what must fail, how, and since when. It fails the run when it stops failing, when it fails differently, and
when it matches no pair of the level it names. Nothing is ever skipped because of it.
"""

from __future__ import annotations

import fnmatch
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from datetime import date
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from cases.case import Entry, Level
from harness.backends import Backend, UnknownBackend
from harness.verdict import Outcome, Verdict

LEDGER = Path(__file__).parent.parent / "cases" / "known_issues.toml"
_HEADER = re.compile(r"^\s*\[\[\s*issue\s*\]\]\s*(#.*)?$")
_MOST = 1e6  # times what is needed: more than a machine has
_PEAK = "PEAK"  # begins the signature of load_oracles.peak
_NO_FAULT = (Outcome.PASS, Outcome.UNSUPPORTED, Outcome.UNAVAILABLE)
_TOML_LINE = re.compile(r"\(at line (\d+)")
_TEXT = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*''', re.DOTALL
)  # TOML's strings and comments
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)

T = TypeVar("T", Entry, Outcome, Level)


class LedgerError(ValueError):
    """The file is malformed: ``path:line: what is wrong and what would be right``."""


class Standing(StrEnum):
    """How a verdict stands to the ledger."""

    CLEAN = "clean"  # passed or refused by design, and no entry expects otherwise
    KNOWN = "known"  # failed exactly as an entry says
    NEW = "new"  # failed, and no entry knows it
    STOPPED_FAILING = "stopped failing"  # an entry expects a failure that did not happen
    FAILS_DIFFERENTLY = "fails differently"  # another outcome or signature than the entry's


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """One entry. Patterns are shell patterns over the whole case id (`*`, `?`; `[` is literal)."""

    id: str
    cases: tuple[str, ...]  # patterns; one that matches is enough
    entry: Entry
    backends: tuple[Backend, ...]
    vllm: SpecifierSet  # affected versions
    outcome: Outcome
    signature: tuple[str, ...]  # shell patterns over Verdict.signature; one that matches is enough
    link: str
    since: str  # date it was entered, ISO
    note: str
    level: Level = Level.SMOKE  # smallest level in which a pair must match
    peak: float | None = None  # of a signature of PEAK: the most memory at once that was seen, over what is needed

    def concerns(self, backend: Backend, version: str) -> bool:
        """Whether this entry speaks of that backend of that vLLM."""
        try:
            affected = self.vllm.contains(Version(version), prereleases=True)
        except InvalidVersion:
            affected = True  # a working tree without a version: the entry still describes the code
        return affected and backend in self.backends

    def covers(self, case_id: str, entry: Entry, backend: Backend, version: str) -> bool:
        """Whether this entry speaks of that pair."""
        return self.concerns(backend, version) and entry is self.entry and any(matches(case_id, pattern) for pattern in self.cases)


def matches(text: str, pattern: str) -> bool:
    """Shell pattern with ``*`` and ``?`` only: ids may hold brackets."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict's standing, the entry concerned, and a sentence for the reader."""

    standing: Standing
    issue: KnownIssue | None = None
    sentence: str = ""

    @property
    def as_expected(self) -> bool:
        """True when this does not fail the run."""
        return self.standing in (Standing.CLEAN, Standing.KNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All entries of one file, in its order; the first that covers a pair speaks for it, unless the pair is refused by design."""

    issues: tuple[KnownIssue, ...]

    def judge(self, verdict: Verdict, case_id: str, entry: Entry, backend: Backend, version: str) -> Judged:
        """How ``verdict`` stands."""
        if verdict.outcome is Outcome.UNSUPPORTED:
            return Judged(standing=Standing.CLEAN)
        issue = next((i for i in self.issues if i.covers(case_id, entry, backend, version)), None)
        failed = verdict.outcome is not Outcome.PASS
        if issue is None:
            if not failed:
                return Judged(standing=Standing.CLEAN)
            return Judged(standing=Standing.NEW, sentence=f"{verdict.outcome} and no entry of {LEDGER.name} knows it")
        if not failed:
            sentence = f"ledger entry '{issue.id}' expects {issue.outcome}, but it ended {verdict.outcome}: if fixed, narrow `vllm`"
            return Judged(standing=Standing.STOPPED_FAILING, issue=issue, sentence=sentence)
        if verdict.outcome is issue.outcome and any(matches(verdict.signature, pattern) for pattern in issue.signature):
            if issue.peak is not None and verdict.margin is not None and verdict.margin > issue.peak:
                known = f"memory up to {issue.peak:g} times what is needed"
                sentence = f"ledger entry '{issue.id}' expects {known}, but it took {verdict.margin:.2f} times that"
                return Judged(standing=Standing.FAILS_DIFFERENTLY, issue=issue, sentence=sentence)
            return Judged(standing=Standing.KNOWN, issue=issue, sentence=issue.note)
        expected, found = f"{issue.outcome} {' or '.join(issue.signature)}", f"{verdict.outcome} {verdict.signature}"
        sentence = f"ledger entry '{issue.id}' expects {expected}, but it ended {found}"
        return Judged(standing=Standing.FAILS_DIFFERENTLY, issue=issue, sentence=sentence)

    def unmatched(self, pairs: Iterable[tuple[str, Entry]], backend: Backend, version: str) -> tuple[KnownIssue, ...]:
        """Entries for this backend and version that match no pair given; ``pairs`` are those of the entry's level."""
        here = list(pairs)
        concerned = [issue for issue in self.issues if issue.concerns(backend, version)]
        return tuple(i for i in concerned if not any(i.covers(case_id, entry, backend, version) for case_id, entry in here))


def load(path: Path = LEDGER) -> Ledger:
    """Read and check every entry. Raises LedgerError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise LedgerError(f"{path}:{number}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); save the file as UTF-8") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _TOML_LINE.search(str(error))
        line = found[1] if found else str(len(text.splitlines()))
        raise LedgerError(f"{path}:{line}: not TOML ({error})") from None
    except ValueError:  # of int()
        most = sys.get_int_max_str_digits()
        line = _line_of(text, re.search(rf"\d(?:_?\d){{{most}}}", text))
        raise LedgerError(f"{path}:{line}: a number of more than {most} digits; only strings, their lists and `peak` belong here") from None
    except RecursionError:
        raise LedgerError(f"{path}:{_deepest(text)}: brackets nested too deep; only strings and lists of strings belong here") from None
    lines = [number for number, line in enumerate(_bare(text).split("\n"), 1) if _HEADER.match(line)]
    entries = document.pop("issue", [])
    if document or not isinstance(entries, list) or len(lines) != len(entries):
        raise LedgerError(f"{path}:1: only [[issue]] tables belong here, found {', '.join(document) or 'another form of `issue`'}")
    issues = tuple(_issue(path, line, entry) for line, entry in zip(lines, entries, strict=True))
    for line, issue in zip(lines, issues, strict=True):
        if sum(other.id == issue.id for other in issues) > 1:
            raise LedgerError(f"{path}:{line}: id '{issue.id}' is used twice; give each entry its own")
    return Ledger(issues=issues)


def _bare(text: str) -> str:
    """The text without strings and comments, on the same lines."""
    return _TEXT.sub(lambda found: "\n" * found[0].count("\n"), text)


def _line_of(text: str, found: re.Match[str] | None) -> int:
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _deepest(text: str) -> int:
    """The line in which most brackets are open at once."""
    depths = accumulate(line.count("[") + line.count("{") - line.count("]") - line.count("}") for line in _bare(text).split("\n"))
    return max(enumerate(depths, 1), key=lambda each: each[1])[0]


def _date(text: str) -> bool:
    """Whether it is YYYY-MM-DD."""
    try:
        return _DATE.fullmatch(text) is not None and bool(date.fromisoformat(text))
    except ValueError:
        return False


def _issue(path: Path, line: int, entry: dict[str, object]) -> KnownIssue:
    def wrong(what: str) -> LedgerError:
        return LedgerError(f"{path}:{line}: {what}")

    known = {f.name: f for f in fields(KnownIssue)}
    if unknown := sorted(set(entry) - set(known)):
        raise wrong(f"unknown key '{unknown[0]}'; the keys are {', '.join(known)}")
    if absent := [name for name, f in known.items() if f.default is MISSING and name not in entry]:
        raise wrong(f"key '{absent[0]}' is missing")

    def patterns(key: str) -> tuple[str, ...]:
        given = entry[key] if isinstance(entry[key], list) else [entry[key]]
        if not isinstance(given, list) or not given or not all(isinstance(each, str) and each.strip() for each in given):
            raise wrong(f"'{key}' must be a pattern or a list of patterns, got {entry[key]!r}")
        return tuple(given)

    cases, signature = patterns("cases"), patterns("signature")
    texts = {name: value for name, value in entry.items() if name not in ("backends", "cases", "signature", "peak")}
    if bad := [name for name, value in texts.items() if not isinstance(value, str) or not value.strip()]:
        raise wrong(f"'{bad[0]}' must be a non-empty string, got {entry[bad[0]]!r}")
    if not _date(str(entry["since"])):
        raise wrong(f"'since' is {entry['since']!r}; it must be a date, such as 2026-11-30")
    backends = entry["backends"]
    if not isinstance(backends, list) or not backends:
        raise wrong(f"'backends' must be a non-empty list, got {backends!r}")

    def typed(key: str, valid: type[T]) -> T:
        text = entry.get(key, Level.SMOKE.value)
        if text not in (names := [each.value for each in valid if each.value not in _NO_FAULT]):
            raise wrong(f"'{key}' is {text!r}; it must be one of {', '.join(names)}")
        return valid(text)

    try:
        affected = SpecifierSet(str(entry["vllm"]))
    except InvalidSpecifier:
        raise wrong(f"'vllm' is {entry['vllm']!r}; it must be a specifier of versions, such as <=0.33.0") from None
    try:
        speaks_of = tuple(Backend.parse(str(each)) for each in backends)
    except UnknownBackend as error:
        raise wrong(f"'backends': {error}") from None
    return KnownIssue(
        id=str(entry["id"]),
        cases=cases,
        entry=typed("entry", Entry),
        backends=speaks_of,
        vllm=affected,
        outcome=typed("outcome", Outcome),
        signature=signature,
        link=str(entry["link"]),
        since=str(entry["since"]),
        note=str(entry["note"]),
        level=typed("level", Level),
        peak=_peak(entry.get("peak"), signature, wrong),
    )


def _peak(given: object, signature: tuple[str, ...], wrong: Callable[[str], LedgerError]) -> float | None:
    if not any(pattern.startswith(_PEAK) for pattern in signature):
        if given is not None:
            raise wrong(f"'peak' goes with a signature of {_PEAK}, got {', '.join(signature)}")
        return None
    if not isinstance(given, (int, float)) or not 1 < given <= _MOST:
        got = "is missing" if given is None else f"is {given!r}"
        raise wrong(f"'peak' {got}; a signature of {_PEAK} needs it: memory at once over what is needed, a number above 1, such as 8.7")
    return float(given)
