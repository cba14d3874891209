"""What counts as bad, which pairs are run, what is remembered; without a process or a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cases.case import Entry
from harness.bisect.hunt import Answer, Hunt, Log, RegressOn, judge, overall
from harness.bisect.observe import Observation, unavailable
from harness.bisect.search import Ambiguous, Cause, Found, NotFound, Status
from harness.bisect.spec import Release, State
from harness.bisect.states import StateRun
from harness.bisect.trees import Tree
from harness.bisect.trouble import StateError, StateUnavailable
from harness.pairs import Pair, parse_case
from harness.verdict import Outcome, Verdict

A, B = (
    Pair(parse_case(f"bf16-none-none-plain-silu-bf16-e4k2m8h128i64-{routing}"), Entry.FUSED_EXPERTS) for routing in ("balanced", "skewed")
)
G, BAD, U = Status.GOOD, Status.BAD, Status.UNKNOWN


def observation(pair: str, what: str) -> Observation:
    """``PASS``, ``MISMATCH X``, ``LOAD_ERROR KeyError: …``, ``UNAVAILABLE``."""
    outcome, _, signature = what.partition(" ")
    if outcome == "UNAVAILABLE":
        return unavailable(pair, "cannot be driven", signature or "PAIR")
    detail = signature if outcome in ("LOAD_ERROR", "RUN_ERROR") else ""
    return Observation(pair=pair, verdict=Verdict(outcome=Outcome(outcome), claim="c", signature=signature, detail=detail))


class History:
    """revision -> what each pair shows; a str alone is for both pairs; "!…" cannot be planted."""

    def __init__(self, **states: str | tuple[str, str]) -> None:
        self.states = states
        self.ran: list[tuple[str, tuple[str, ...]]] = []

    def __call__(self, revision: str, pairs: Sequence[Pair]) -> StateRun:
        state = self.states[revision]
        if isinstance(state, str) and state.startswith("!"):
            raise StateUnavailable(state[1:])
        self.ran.append((revision, tuple(pair.id for pair in pairs)))
        both = {A.id: state, B.id: state} if isinstance(state, str) else dict(zip((A.id, B.id), state, strict=True))
        tree = Tree(state=State(name=revision, base=Release(version="1")), key=self.key(revision), paths=(), version="1")
        return StateRun(tree=tree, observations={pair.id: observation(pair.id, both[pair.id]) for pair in pairs})

    def key(self, revision: str) -> str:
        return f"key of {revision}"

    def hunt(self, on: RegressOn = RegressOn.SIGNATURE, log: Log | None = None, key: Callable[[str], str] | None = None) -> Hunt:
        return Hunt(pairs=(A, B), on=on, run=self, log=log or Log(path=None, asked={}), key_of=key or self.key)

    def search(self, on: RegressOn = RegressOn.SIGNATURE) -> Found | Ambiguous | NotFound:
        return self.hunt(on).search(list(self.states))


@pytest.mark.parametrize(
    ("what", "signature", "any_failure", "imports", "fixed"),
    [
        ("PASS", G, G, G, BAD),
        ("MISMATCH X", BAD, BAD, G, G),
        ("MISMATCH Y", U, BAD, G, G),
        ("NOT_IDENTICAL X", U, BAD, G, G),
        ("LOAD_ERROR KeyError: 1", U, BAD, G, G),
        ("LOAD_ERROR ImportError: 1", U, U, BAD, U),
        ("RUN_ERROR SyntaxError: 1", U, U, BAD, U),
        ("UNSUPPORTED", U, U, G, U),
        ("UNAVAILABLE STATE", U, U, BAD, U),
        ("UNAVAILABLE PAIR", U, U, U, U),
    ],
)
def test_what_counts_as_bad(what: str, signature: Status, any_failure: Status, imports: Status, fixed: Status) -> None:
    each = observation("p", what)
    assert judge(each, RegressOn.SIGNATURE, "MISMATCH X") is signature
    assert judge(each, RegressOn.ANY) is any_failure
    assert judge(each, RegressOn.IMPORT) is imports
    assert judge(each, RegressOn.FIXED) is fixed


def test_signatures_are_equal_in_different_trees() -> None:
    one = observation("p", "RUN_ERROR OSError: /tmp/cache/a1/tree/vllm/x.py at 0x7f00")
    other = observation("p", "RUN_ERROR OSError: /home/b2/tree/vllm/x.py at 0x7fff")
    assert one.signature == other.signature != observation("p", "RUN_ERROR OSError: y.py").signature


def test_of_several_pairs() -> None:
    assert overall([G, BAD, U], RegressOn.ANY) is BAD
    assert overall([G, U], RegressOn.ANY) is U
    assert overall([G, G], RegressOn.SIGNATURE) is G
    assert overall([BAD, G, U], RegressOn.FIXED) is G
    assert overall([BAD, U], RegressOn.FIXED) is U
    assert overall([], RegressOn.ANY) is U


def test_an_older_failure_of_another_kind_is_passed_over() -> None:
    history = History(a="PASS", b="MISMATCH X", c="MISMATCH X", d="PASS", e="PASS", f="MISMATCH Y", g="MISMATCH Y")
    assert history.search() == Found(culprit="f", last_good="e")
    assert history.search(RegressOn.ANY) == Found(culprit="f", last_good="e")


def test_another_failure_between_is_neither() -> None:
    history = History(a="PASS", b="LOAD_ERROR KeyError", c="MISMATCH X", d="MISMATCH X")
    assert history.search() == Ambiguous(candidates=("b", "c"), last_good="a")
    assert history.search(RegressOn.ANY) == Found(culprit="b", last_good="a")


def test_a_repair_is_found() -> None:
    history = History(a="MISMATCH X", b="MISMATCH X", c="!patch does not apply", d="PASS", e="PASS")
    assert history.search(RegressOn.FIXED) == Ambiguous(candidates=("c", "d"), last_good="b")
    history = History(a="MISMATCH X", b="LOAD_ERROR KeyError", c="PASS", d="PASS")
    assert history.search(RegressOn.FIXED) == Found(culprit="c", last_good="b")


def test_only_pairs_that_tell_the_ends_apart_run_in_between() -> None:
    history = History(a=("PASS", "MISMATCH X"), b=("PASS", "MISMATCH X"), c=("MISMATCH X", "PASS"), d=("MISMATCH X", "MISMATCH X"))
    assert history.search() == Found(culprit="c", last_good="b")
    assert history.ran == [("d", (A.id, B.id)), ("a", (A.id, B.id)), ("c", (A.id,)), ("b", (A.id,))]


def test_a_refusal_that_is_new_counts_and_an_old_one_does_not() -> None:
    assert History(a="PASS", b="UNSUPPORTED").search() == Found(culprit="b", last_good="a")
    assert History(a="UNSUPPORTED", b="UNSUPPORTED").search() == NotFound(cause=Cause.GOOD_END_IS_BAD, revision="a")


@pytest.mark.parametrize(
    ("states", "cause", "revision"),
    [
        ({"a": "PASS", "b": "PASS"}, Cause.BAD_END_IS_GOOD, "b"),
        ({"a": "MISMATCH X", "b": "MISMATCH X"}, Cause.GOOD_END_IS_BAD, "a"),
        ({"a": "PASS", "b": "!no"}, Cause.BAD_END_UNKNOWN, "b"),
        ({"a": "UNAVAILABLE", "b": "MISMATCH X"}, Cause.GOOD_END_UNKNOWN, "a"),
    ],
)
def test_ends_that_span_no_change(states: dict[str, str], cause: Cause, revision: str) -> None:
    assert History(**states).search() == NotFound(cause=cause, revision=revision)


def test_equal_sources_are_run_once() -> None:
    history = History(a="PASS", b="PASS", c="PASS", d="PASS", e="MISMATCH X")
    hunt = history.hunt(key=lambda name: f"key of {'a' if name < 'd' else name}")
    assert hunt.search(list(history.states)) == Found(culprit="e", last_good="d")
    assert [name for name, _ in history.ran] == ["e", "a", "d"]
    assert hunt.log.answers["c"] == Answer(status=G, why="same sources as a", key="key of a")


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    path, asked = tmp_path / "log.json", {"good": "a", "bad": "h"}
    states: dict[str, str | tuple[str, str]] = {name: "PASS" if name < "f" else "MISMATCH X" for name in "abcdefgh"}
    history = History(**states)

    def interrupt(revision: str, _answer: Answer) -> None:
        if len(history.ran) == 3:
            raise KeyboardInterrupt

    first = history.hunt(log=Log.start(path, asked, resume=False))
    first.tell = interrupt
    with pytest.raises(KeyboardInterrupt):
        first.search(list(states))
    again = History(**states)
    assert again.hunt(log=Log.start(path, asked, resume=True)).search(list(states)) == Found(culprit="f", last_good="e")
    assert not {name for name, _ in again.ran} & {name for name, _ in history.ran}
    resumed = Log.start(path, asked, resume=True)
    assert {name: [each.signature for each in resumed.observed(name).values()] for name in ("e", "f", "h", "b")} == {
        "e": ["PASS"] * 2, "f": ["MISMATCH X"] * 2, "h": ["MISMATCH X"] * 2, "b": [],
    }  # fmt: skip
    assert len(again.ran) + len(history.ran) <= 2 + 3
    with pytest.raises(StateError, match=r"is the log of another search \(bad differ\): leave --resume out"):
        Log.start(path, asked | {"bad": "g"}, resume=True)
    with pytest.raises(StateError, match="there is no search to resume at"):
        Log.start(tmp_path / "none.json", asked, resume=True)
    for damaged in ("", "[]", '{"asked": {}}', path.read_text()[:-9]):
        path.write_text(damaged)
        with pytest.raises(StateError, match=r"is no log of a search that this moediff reads|is the log of another search"):
            Log.start(path, asked, resume=True)
