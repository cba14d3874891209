"""The search alone: which revision is the first bad one. No git, no vLLM, no clock.

Revisions are an ordered sequence of names that starts with a good one and ends with a bad one. A probe answers GOOD, BAD or UNKNOWN.
An UNKNOWN is never counted as either: what only UNKNOWN revisions could decide is handed back as a list of candidates.

Cost, for n revisions between the ends: at most ``2 + bit_length(n)`` probes when none is UNKNOWN; ``2 + 3 * bit_length(n)`` when one
stretch of UNKNOWNs, of any length, lies beside the culprit; ``2 + 3 * bit_length(n) + 2 * (UNKNOWN answers met)`` on any history.

The claim on any history, monotone or not: a culprit's own probe said BAD and its predecessor's said GOOD. With reverts in the range
there can be several such places; one is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Status(StrEnum):
    """What one probe says."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"  # cannot tell: does not import, cannot be driven, fails in another way


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The one answer that names a culprit: it is BAD and its predecessor ``last_good`` is GOOD, both probed."""

    culprit: str
    last_good: str

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return f"the first bad revision is {self.culprit}; the one before it, {self.last_good}, is good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambiguous:
    """The culprit is one of ``candidates``: the last is BAD, the others UNKNOWN, or not probed where the search was stopped."""

    candidates: tuple[str, ...]
    last_good: str
    untested: int = 0

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        why = f"{self.untested} of them were not probed, the search was stopped" if self.untested else "all but the last cannot be judged"
        return (
            f"the first bad revision is one of {len(self.candidates)}, {self.candidates[0]} to {self.candidates[-1]} ({why}); "
            f"the last good one is {self.last_good}"
        )


class Cause(StrEnum):
    """Why there is nothing to search."""

    TOO_FEW = "too few revisions"
    GOOD_END_IS_BAD = "good end is bad"
    BAD_END_IS_GOOD = "bad end is good"
    GOOD_END_UNKNOWN = "good end unknown"
    BAD_END_UNKNOWN = "bad end unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFound:
    """The ends do not span a change."""

    cause: Cause
    revision: str = ""  # the end that is not what it was given as

    @property
    def sentence(self) -> str:
        """The reason, and what to do."""
        return {
            Cause.TOO_FEW: "a search needs two different revisions, a good one before a bad one",
            Cause.GOOD_END_IS_BAD: f"{self.revision}, given as good, is bad: give an older good revision",
            Cause.BAD_END_IS_GOOD: f"{self.revision}, given as bad, is good: give a newer bad revision, or cases that show the fault",
            Cause.GOOD_END_UNKNOWN: f"{self.revision}, given as good, cannot be judged: give a good revision that can be driven",
            Cause.BAD_END_UNKNOWN: f"{self.revision}, given as bad, cannot be judged: give a bad revision that can be driven",
        }[self.cause]


Result = Found | Ambiguous | NotFound


def first_bad(
    revisions: Sequence[str], probe: Callable[[str], Status], *, known: Mapping[str, Status] | None = None, limit: int | None = None
) -> Result:
    """Find the first BAD revision.

    Args:
        revisions: distinct names, the good end first and the bad end last.
        probe: called at most once per revision; both ends first, the bad one before the good one.
        known: answers of an earlier, interrupted search; these are not probed again.
        limit: stop after this many probes, both ends included; the answer is then Ambiguous with its untested candidates counted.

    Raises:
        ValueError: a revision occurs twice.
    """
    if len(set(revisions)) != len(revisions):
        raise ValueError("a revision occurs twice in the range")
    if len(revisions) < 2:
        return NotFound(cause=Cause.TOO_FEW)
    answers: dict[int, Status] = {i: known[name] for i, name in enumerate(revisions) if known and name in known}
    spent = 0

    def ask(i: int) -> Status:
        nonlocal spent
        if i not in answers:
            answers[i] = probe(revisions[i])
            spent += 1
        return answers[i]

    low, high = 0, len(revisions) - 1
    bad_end = ask(high)
    if bad_end is not Status.BAD:
        return NotFound(cause=Cause.BAD_END_IS_GOOD if bad_end is Status.GOOD else Cause.BAD_END_UNKNOWN, revision=revisions[high])
    good_end = ask(low)
    if good_end is not Status.GOOD:
        return NotFound(cause=Cause.GOOD_END_IS_BAD if good_end is Status.BAD else Cause.GOOD_END_UNKNOWN, revision=revisions[low])

    low, high = _narrow(answers, low, high)
    while untested := [i for i in range(low + 1, high) if i not in answers]:
        if limit is not None and spent >= limit:
            break
        place = _next(low, high, untested, [i for i in range(low + 1, high) if i in answers])
        match ask(place):
            case Status.GOOD:
                low = place
            case Status.BAD:
                high = place
            case Status.UNKNOWN:
                pass
    if high - low == 1:
        return Found(culprit=revisions[high], last_good=revisions[low])
    return Ambiguous(candidates=tuple(revisions[low + 1 : high + 1]), last_good=revisions[low], untested=len(untested))


def turns(revisions: Sequence[str], answers: Mapping[str, Status]) -> tuple[tuple[str, str], ...]:
    """Pairs (older, newer) of judged neighbours that disagree, UNKNOWN and unprobed ones left out: more than one says there are reverts."""
    judged = [name for name in revisions if answers.get(name, Status.UNKNOWN) is not Status.UNKNOWN]
    return tuple((a, b) for a, b in pairwise(judged) if answers[a] is not answers[b])


def _narrow(answers: Mapping[int, Status], low: int, high: int) -> tuple[int, int]:
    """The tightest (GOOD, BAD) pair that earlier answers give: the first BAD above ``low``, then the last GOOD below it."""
    high = min(_with(answers, Status.BAD, low, high), default=high)
    return max(_with(answers, Status.GOOD, low, high), default=low), high


def _with(answers: Mapping[int, Status], status: Status, low: int, high: int) -> Iterable[int]:
    return [i for i, answer in answers.items() if low < i < high and answer is status]


def _next(low: int, high: int, untested: Sequence[int], unknown: Sequence[int]) -> int:
    """Where to probe: the middle, kept away from the UNKNOWNs met so far.

    What lies between two UNKNOWNs is presumed to be UNKNOWN too and comes last. Beside them the middle of what is left is taken, but at
    least as far from them as they reach (so a stretch is crossed in doubling steps), and never past the middle of that side.
    """
    if not unknown:
        return untested[len(untested) // 2]
    left = [i for i in untested if i < unknown[0]]
    right = [i for i in untested if i > unknown[-1]]
    if not left and not right:  # the widest gap between two that are known to be UNKNOWN
        edges = [low, *unknown, high]
        start, stop = max(pairwise(edges), key=lambda gap: gap[1] - gap[0])
        return (start + stop) // 2
    reach = unknown[-1] - unknown[0] + 1
    side = left[::-1] if len(left) > len(right) else right  # nearest to the UNKNOWNs first
    away = max((abs(len(left) - len(right)) - 1) // 2, min(reach, len(side) // 2))
    return side[min(away, len(side) - 1)]
