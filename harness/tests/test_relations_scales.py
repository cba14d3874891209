"""The perturbations of the smoke level, as the reference sees them: what is predicted to move does, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from cases.case import ActScale, Entry, Level, MoECase
from cases.lattice_pairs import Pair, lattice_pairs
from harness.backends import Backend, declared_refusal
from harness.exact import BUILDERS, Drive, verdict
from harness.relations import Relation, asked
from harness.relations_check import Setting, Variant, check
from harness.relations_scales import DOWN, FACTORS, GATE, UP
from harness.subject.fake import FakeSubject
from harness.verdict import Outcome
from references.vocabulary import Format, Layout

LANE = Backend.INTERPRETER
SMOKE = [pair for pair in lattice_pairs(Level.SMOKE) if declared_refusal(*pair, LANE) is None]
PERTURBED = {Relation.DOWN_SCALE: DOWN, Relation.UP_SCALE: UP, Relation.GATE_SCALE: GATE}
PER_TENSOR_OR_TOKEN = (ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR, ActScale.DYNAMIC_TOKEN)
CHANNEL = ("int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice", Entry.LAYER)


@cache
def variants(pair: Pair) -> tuple[Setting, dict[Relation, list[Variant]]]:
    start = Setting.of(*pair, LANE)
    wanted = [relation for relation in asked(*pair, LANE) if relation in {*PERTURBED, Relation.INPUT_SCALE}]
    return start, {relation: list(BUILDERS[relation](start)) for relation in wanted}


def layouts(case: MoECase) -> tuple[str, str, str]:
    return case.weight if case.quantized else "unquantized", case.weight_scale, case.act_scale


@pytest.mark.parametrize("place", SMOKE, ids=lambda place: f"{place[0].id}[{place[1]}]")
def test_what_is_predicted_to_move_does_and_nothing_else(place: Pair) -> None:
    start, found = variants(place)
    for variant in (each for every in found.values() for each in every):
        before, after = start.proof, variant.setting.proof
        if before is None or after is None:
            assert place[0].dtype is Format.FP32
            continue
        moved = before.output != after.output
        region = torch.zeros_like(moved) if variant.region is None else variant.region
        assert bool((moved & region).any()) == bool(region.any()), variant.change
        assert not bool((moved & ~region).any()), variant.change
        if variant.factor is not None:
            assert torch.equal(after.output[region], before.output[region] * variant.factor)


def test_every_pairing_of_layouts_has_each_projection_perturbed_by_three_powers_of_two() -> None:
    seen: dict[tuple[object, ...], set[float]] = defaultdict(set)
    for pair in SMOKE:
        for relation, every in variants(pair)[1].items():
            if relation in PERTURBED:
                seen[*layouts(pair[0]), PERTURBED[relation]] |= {float(each.change.rpartition(" ")[2]) for each in every}
    independent = product((Format.INT8, Format.E4M3FN), (Layout.TENSOR, Layout.CHANNEL), PER_TENSOR_OR_TOKEN, PERTURBED.values())
    others = {layouts(case) for case, _ in lattice_pairs(Level.NIGHTLY)}
    assert {*independent, *((*what, half) for what, half in product(others, PERTURBED.values()))} - set(seen) == set()
    third = set(FACTORS[2]) - {2.0, 0.5}
    assert [what for what, factors in seen.items() if not {2.0, 0.5} <= factors or not factors & third] == []


def test_every_pairing_of_layouts_has_its_controls() -> None:
    controls = {Relation.REPEATED, Relation.UNROUTED_SCALE, Relation.REFERENCE}
    held: dict[tuple[str, str, str], set[Relation]] = defaultdict(set)
    for pair in SMOKE:
        held[layouts(pair[0])] |= controls & set(asked(*pair, LANE))
    assert {what for what, those in held.items() if those != controls} == set()


@pytest.mark.parametrize("relation", PERTURBED)
def test_a_perturbation_on_one_side_only_is_found_and_the_message_says_where(relation: Relation) -> None:
    """The control: the same scale on the reference side, and on the subject's not."""
    start = Setting.of(MoECase.from_id(CHANNEL[0]), CHANNEL[1], LANE)
    drive = Drive(FakeSubject())
    output = drive.start(start)[1]
    for variant in BUILDERS[relation](start):
        assert check(relation, variant, output, drive.after(variant, start)) is None
        broken = check(relation, variant, output, output)
        assert broken is not None
        assert broken.moved == "nothing"
        assert "(0x" in broken.expected
        assert "(0x" in broken.actual
        assert broken.predicted.startswith(variant.where)


def test_a_change_outside_the_region_is_found_for_every_perturbation() -> None:
    start = Setting.of(MoECase.from_id(CHANNEL[0]), CHANNEL[1], LANE)
    drive = Drive(FakeSubject())
    output = drive.start(start)[1]
    for variant in BUILDERS[Relation.DOWN_SCALE](start):
        after = drive.after(variant, start).clone()
        assert variant.region is not None
        token, channel = (int(i) for i in (~variant.region).nonzero()[0])
        after[token, channel] *= 2
        broken = check(Relation.DOWN_SCALE, variant, output, after)
        assert broken is not None
        assert (broken.index, broken.differing) == ((token, channel), 1)


def test_an_honest_fake_keeps_every_perturbation_of_a_nightly_pair() -> None:
    start = Setting.of(replace(MoECase.from_id(CHANNEL[0]), tokens=3, top_k=2), Entry.LAYER, LANE)
    drive = Drive(FakeSubject())
    assert all(verdict(relation, start, drive).outcome is Outcome.PASS for relation in PERTURBED)


@pytest.mark.parametrize(
    "place",
    [
        ("e4m3fn-block128-dyngroup128-vllmfp8-gelu-fp16-e3k2m2h128i256-balanced-lattice", Entry.FUSED_EXPERTS),
        ("e4m3fn-channel-dyntoken-online-silu-fp16-e4k2m8h64i32-balanced-lattice", Entry.LAYER),
    ],
)
def test_without_a_proof_too_no_perturbation_leaves_the_range_of_the_dtype(place: tuple[str, Entry]) -> None:
    start = Setting.of(MoECase.from_id(place[0]), place[1], Backend.TRITON)
    assert start.proof is None
    for variant in (*BUILDERS[Relation.GATE_SCALE](start), *BUILDERS[Relation.UP_SCALE](start)):
        assert bool(torch.isfinite(variant.setting.answer.expected).all()), variant.change
