"""Lattices without a single answer: relations that ask the reference ask for its interval, so nothing passes whatever came."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from cases.case import Entry, MoECase
from harness.backends import Backend
from harness.exact import BUILDERS, Drive, reasoned, verdict
from harness.relations import Relation, asked
from harness.relations_check import Setting
from harness.subject import LoadFailed
from harness.subject.fake import FakeSubject
from harness.verdict import Outcome

if TYPE_CHECKING:
    from cases.batch import Batch
    from harness.subject import Loaded, Ran

UNPROVEN = MoECase.from_id("fp32-none-none-plain-gelu-fp32-e4k1m3h64i32-balanced-lattice")
LANE = Backend.INTERPRETER


class Constant(FakeSubject):
    value = 0.0

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        ran = super().run(loaded, batch)
        return replace(ran, output=torch.full_like(ran.output, self.value))


@pytest.fixture
def setting() -> Setting:
    made = Setting.of(UNPROVEN, Entry.FUSED_EXPERTS, LANE)
    assert made.proof is None
    return made


def test_the_reference_is_asked_for_its_interval(setting: Setting) -> None:
    assert Relation.REFERENCE in asked(UNPROVEN, Entry.FUSED_EXPERTS, LANE)
    assert verdict(Relation.REFERENCE, setting, Drive(FakeSubject())).outcome is Outcome.PASS


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("relation", [Relation.REFERENCE, Relation.PERMUTED_EXPERTS])
def test_a_constant_is_no_answer(setting: Setting, relation: Relation, value: float) -> None:
    subject = Constant()
    subject.value = value
    caught = verdict(relation, setting, Drive(subject)).outcome is Outcome.NOT_IDENTICAL
    assert caught == (relation is Relation.REFERENCE), "a relation between two outputs cannot see it: that is why the reference is asked"


def test_a_relation_that_changes_nothing_is_no_pass(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, Relation.REPEATED, lambda setting: iter(()))
    with pytest.raises(LookupError, match="has nothing to change"):
        verdict(Relation.REPEATED, setting, Drive(FakeSubject()))


def test_a_slip_of_python_is_no_reason() -> None:
    assert reasoned(LoadFailed("ValueError: scales must be contiguous"))
    assert not reasoned(LoadFailed("TypeError: 'NoneType' object is not subscriptable"))
