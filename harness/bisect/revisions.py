"""Which revisions a search goes through: a first-parent line of a checkout, or a row of releases; and the way into a merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.bisect import releases
from harness.bisect.hunt import Hunt
from harness.bisect.repository import Commit, Repository
from harness.bisect.search import Ambiguous, Cause, Found, NotFound, Result
from harness.bisect.spec import Release, Revision, State, parse
from harness.bisect.trouble import StateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Names from good to bad, and what makes a state of a name. ``repository`` is None for releases."""

    names: tuple[str, ...]
    repository: Repository | None

    def state(self, name: str) -> State:
        """The state to plant for a name of the line (or any other commit of the repository)."""
        if self.repository is None:
            return State(name=name, base=Release(version=name))
        return State(name=name[:12], base=Revision(repository=self.repository.path, revision=name))

    def commits(self, result: Result) -> dict[str, Commit]:
        """The culprit or the candidates, by name; empty for releases."""
        repository = self.repository
        if repository is None or isinstance(result, NotFound):
            return {}
        names = (result.culprit,) if isinstance(result, Found) else result.candidates
        return {name: repository.commit(name) for name in names}


def line(good: str, bad: str, repository: Path | None, chosen: Sequence[str] = ()) -> Line:
    """From ``good`` to ``bad``, both ``release:X`` or both revisions. ``chosen``: releases to search instead of all that exist.

    Raises:
        StateError: ends of different kinds, with patches, or that do not follow one another.
    """
    ends = [parse(text, repository) for text in (good, bad)]
    if any(end.patches for end in ends):
        raise StateError("a search takes no patches: name two revisions or two releases")
    first, last = (end.base for end in ends)
    if isinstance(first, Release) and isinstance(last, Release):
        return Line(names=_releases(first.version, last.version, chosen), repository=None)
    if not isinstance(first, Revision) or not isinstance(last, Revision):
        raise StateError(f"--good {good} and --bad {bad} are not two revisions of one checkout, nor two releases")
    if chosen:
        raise StateError("--releases goes with --good release:X and --bad release:Y")
    opened = Repository.at(first.repository)
    return Line(names=opened.between(opened.resolve(first.revision), opened.resolve(last.revision)), repository=opened)


def _releases(good: str, bad: str, chosen: Sequence[str]) -> tuple[str, ...]:
    if releases.order(good) >= releases.order(bad):
        raise StateError(f"release {good}, given as good, must be older than {bad}, given as bad; to find a fix add --regress-on fixed")
    if not chosen:
        return releases.between(good, bad)
    inner = sorted(
        {version for version in chosen if releases.order(good) < releases.order(version) < releases.order(bad)}, key=releases.order
    )
    return (good, *inner, bad)


def into_merges(hunt: Hunt, line: Line, result: Result) -> tuple[Result, str]:
    """Follow a culprit that is a merge into the branch it brought in; the final answer, and a sentence on the merge ('' without one)."""
    repository, said = line.repository, ""
    while repository and isinstance(result, Found) and len(parents := repository.commit(result.culprit).parents) > 1:
        merge, branch = result.culprit[:12], parents[1]
        base = repository.merge_base(parents[0], branch)
        if base is None:
            return result, f"{merge} joins histories that share no commit; its branch {branch[:12]} was not searched"
        inside = hunt.search(repository.between(base, branch))
        match inside:
            case Found() | Ambiguous():
                result, said = inside, f"brought in by {merge}, which merges {branch[:12]}"
            case NotFound(cause=Cause.BAD_END_IS_GOOD | Cause.TOO_FEW):
                return result, f"{merge} merges {branch[:12]}; both of its parents are good: the merge itself is the culprit"
            case _:
                return result, f"{merge} merges {branch[:12]}, and the branch could not be searched: {inside.sentence}"
    return result, said
