"""Lattices reach both of fused_moe.py's ways of giving blocks to experts, and the same tokens cross from one to the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cases.case import Entry, Level, MoECase
from cases.lattice_pairs import lattice_pairs
from harness.backends import Backend
from harness.exact import BUILDERS, Drive
from harness.relations import Relation
from harness.relations_check import Setting

if TYPE_CHECKING:
    from harness.subject.vllm_layer import VllmSubject

pytestmark = pytest.mark.vllm

NAIVE = [
    case for case, entry in lattice_pairs(Level.SMOKE) if entry is Entry.FUSED_EXPERTS and case.tokens * case.top_k * 4 <= case.experts
]


@pytest.mark.parametrize("case", NAIVE, ids=lambda case: case.id)
def test_few_tokens_skip_sorting_and_copies_of_them_do_not(case: MoECase, subject: VllmSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    sorted_ids: list[bool] = []
    prepare = fused_moe._prepare_expert_assignment

    def spy(*args: object, **options: object) -> object:
        found = prepare(*args, **options)
        sorted_ids.append(found[0] is not None)
        return found

    monkeypatch.setattr(fused_moe, "_prepare_expert_assignment", spy)
    start, drive = Setting.of(case, Entry.FUSED_EXPERTS, Backend.INTERPRETER), Drive(subject)
    drive.start(start)
    assert sorted_ids
    assert not any(sorted_ids)
    sorted_ids.clear()
    (copies,) = BUILDERS[Relation.MULTIPLIED_TOKENS](start)
    drive.after(copies, start)
    assert sorted_ids
    assert all(sorted_ids)
