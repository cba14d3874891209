"""The search, on every shape of history: monotone, with reverts, with revisions that cannot be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.bisect.search import Ambiguous, Cause, Found, NotFound, Status, first_bad, turns

G, B, U = Status.GOOD, Status.BAD, Status.UNKNOWN
statuses = st.sampled_from([G, B, U])


def history(*answers: Status) -> dict[str, Status]:
    return {f"r{i}": answer for i, answer in enumerate(answers)}


class Probe:
    """Answers from a table and remembers what it was asked."""

    def __init__(self, table: Mapping[str, Status]) -> None:
        self.table, self.asked = table, list[str]()

    def __call__(self, revision: str) -> Status:
        self.asked.append(revision)
        return self.table[revision]


def check(table: Mapping[str, Status]) -> tuple[Found | Ambiguous, Probe]:
    """What holds for every history whose ends are GOOD and BAD."""
    names = list(table)
    probe = Probe(table)
    result = first_bad(names, probe)
    assert not isinstance(result, NotFound)
    assert len(probe.asked) == len(set(probe.asked)), "probed twice"
    unknowns = sum(table[name] is U for name in probe.asked)
    bits = (len(names) - 2).bit_length()
    assert len(probe.asked) <= 2 + (3 * bits + 2 * unknowns if unknowns else bits)
    at = names.index(result.last_good)
    assert table[result.last_good] is G
    if isinstance(result, Found):
        assert table[result.culprit] is B
        assert names.index(result.culprit) == at + 1
        assert {result.culprit, result.last_good} <= set(probe.asked)
    else:
        *open_ones, last = result.candidates
        assert open_ones
        assert list(result.candidates) == names[at + 1 : at + 1 + len(result.candidates)]
        assert table[last] is B
        assert all(table[name] is U for name in open_ones)
        assert result.untested == 0
    return result, probe


@given(st.integers(1, 400), st.data())
def test_monotone_history_names_the_culprit(n: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, n))
    result, probe = check(history(*[G] * first, *[B] * (n + 1 - first)))
    assert isinstance(result, Found)
    assert result.culprit == f"r{first}"
    assert len(probe.asked) <= 2 + (n - 1).bit_length()


@given(st.integers(1, 120), st.data())
def test_unknowns_never_become_a_guess(n: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, n))
    hidden = data.draw(st.sets(st.integers(1, n - 1) if n > 1 else st.nothing()))
    truth = [G] * first + [B] * (n + 1 - first)
    table = history(*[U if i in hidden else answer for i, answer in enumerate(truth)])
    result, _ = check(table)
    decidable = first not in hidden and first - 1 not in hidden
    assert isinstance(result, Found) == decidable
    if isinstance(result, Found):
        assert result.culprit == f"r{first}"
    else:
        assert f"r{first}" in result.candidates


@given(st.lists(statuses, max_size=80))
@example([B, G, B, G])
def test_any_history_gives_a_place_that_really_turns(middle: list[Status]) -> None:
    check(history(G, *middle, B))


@given(st.integers(3, 600), st.data())
def test_a_long_stretch_of_unknowns_beside_the_culprit_costs_little(n: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, n - 1))
    stop = data.draw(st.integers(start, n - 1))
    first = data.draw(st.integers(1, n).filter(lambda i: not start <= i <= stop + 1))
    truth = [G] * first + [B] * (n + 1 - first)
    result, probe = check(history(*[U if start <= i <= stop else answer for i, answer in enumerate(truth)]))
    assert isinstance(result, Found)
    assert len(probe.asked) <= 2 + 3 * (n - 1).bit_length()


@given(st.lists(statuses, min_size=1, max_size=60), st.data())
def test_resuming_asks_nothing_twice_and_ends_in_a_real_turn(middle: list[Status], data: st.DataObject) -> None:
    table = history(G, *middle, B)
    whole = Probe(table)
    first_bad(list(table), whole)
    kept = {name: table[name] for name in whole.asked[: data.draw(st.integers(0, len(whole.asked)))]}
    resumed = Probe(table)
    result = first_bad(list(table), resumed, known=kept)
    assert not set(resumed.asked) & set(kept)
    if isinstance(result, Found):
        assert (table[result.last_good], table[result.culprit]) == (G, B)


@given(st.lists(st.sampled_from([G, B]), min_size=3, max_size=60), st.integers(2, 6))
def test_a_stopped_search_says_what_it_did_not_probe(middle: list[Status], limit: int) -> None:
    table = history(G, *middle, B)
    probe = Probe(table)
    result = first_bad(list(table), probe, limit=limit)
    assert len(probe.asked) <= limit
    if isinstance(result, Ambiguous):
        assert result.untested == sum(name not in probe.asked for name in result.candidates[:-1]) > 0


@pytest.mark.parametrize(
    ("table", "cause", "revision"),
    [
        (history(), Cause.TOO_FEW, ""),
        (history(G), Cause.TOO_FEW, ""),
        (history(G, B, G), Cause.BAD_END_IS_GOOD, "r2"),
        (history(G, B, U), Cause.BAD_END_UNKNOWN, "r2"),
        (history(B, G, B), Cause.GOOD_END_IS_BAD, "r0"),
        (history(U, G, B), Cause.GOOD_END_UNKNOWN, "r0"),
    ],
)
def test_ends_are_probed_first_and_named(table: Mapping[str, Status], cause: Cause, revision: str) -> None:
    probe = Probe(table)
    result = first_bad(list(table), probe)
    assert result == NotFound(cause=cause, revision=revision)
    assert result.sentence.startswith(revision)
    assert set(probe.asked) <= {"r0", "r2"}


def test_a_repeated_revision_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        first_bad(["a", "b", "a"], Probe({"a": G, "b": B}))


def test_sentences_name_the_range() -> None:
    found, _ = check(history(G, G, B, B))
    assert found.sentence == "the first bad revision is r2; the one before it, r1, is good"
    ambiguous, _ = check(history(G, U, U, B))
    assert ambiguous.sentence == "the first bad revision is one of 3, r1 to r3 (all but the last cannot be judged); the last good one is r0"


def test_turns_show_reverts() -> None:
    names: Sequence[str] = list(history(G, B, U, G, B))
    assert turns(names, history(G, B, U, G, B)) == (("r0", "r1"), ("r1", "r3"), ("r3", "r4"))
    assert turns(names, {"r0": G, "r4": B}) == (("r0", "r4"),)
