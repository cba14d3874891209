"""Each fault computed here a second way, by hand where that is possible, and the fake subject beside the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import expected, judge
from harness.backends import Backend
from harness.compare import compare
from harness.explained import NEAR
from harness.faults import Fault, applicable, why_not
from harness.fit import evaluate
from harness.inject import Inputs, contributions, with_all
from harness.inject_gains import gained, target
from harness.inject_humming import as_e5m0
from harness.inject_marlin import in_order_of_channels, in_order_of_groups, read_as_16_bits, unpermuted
from harness.message import _fits
from harness.recipes import recipe
from harness.subject.fake import FakeSubject
from harness.verdict import FaultFit, Outcome
from references.formats import torch_dtype
from references.loading import load
from references.moe import Routing
from references.vocabulary import Format

CHANNEL = MoECase.from_id("int8-channel-static-quark-silu-fp32-e4k2m8h128i64-balanced")
BLOCK = MoECase.from_id("e4m3fn-block128-dyngroup128-quark-silu-bf16-e4k2m8h384i256-balanced")
TENSOR = MoECase.from_id("e4m3fn-tensor-static-quark-silu-fp32-e4k2m8h128i64-balanced")
MARLIN = MoECase.from_id("e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i64-balanced-bias")
MARLIN_GROUP = MoECase.from_id("int8-group128-none-ct-silu-bf16-e5k3m3h128i256-balanced")
MARLIN_GROUPS = MoECase.from_id("int4-group128-none-ct-silu-bf16-e5k3m3h256i128-balanced")
HUMMING = MoECase.from_id("e4m3fn-group32-dyngroup32-online-silu-fp16-e4k2m8h128i64-skewed-bias")
QUARTERS = MoECase.from_id("e2m1-group32-none-quark-gelu_tanh-fp16-e8k2m33h256i128-single")
ZERO_POINTS = MoECase.from_id("uint4-group128-none-ct-silu-bf16-e4k2m8h128i128-balanced")
SYMMETRIC = MoECase.from_id("int4-group32-none-gptq-silu-bf16-e5k3m3h192i96-balanced")
NIBBLES = MoECase.from_id("e2m1-group16-dyngroup16-ct-silu-bf16-e4k2m8h128i64-balanced")
LIMITED = MoECase.from_id("bf16-none-none-plain-situ-bf16-e4k2m8h128i64-balanced-norenorm-tight")
TOKEN = MoECase.from_id("int8-channel-dyntoken-quark-silu-fp32-e4k1m8h128i64-balanced")


def inputs_of(case: MoECase, entry: Entry = Entry.FUSED_EXPERTS, backend: Backend = Backend.INTERPRETER) -> Inputs:
    checkpoint, batch = make_checkpoint(case), make_batch(case)
    how = recipe(case, entry, backend)
    stored = expected.experts(case, checkpoint)
    return Inputs(
        experts=stored,
        loaded=load(stored, how),
        hidden_states=batch.hidden_states,
        router_logits=batch.router_logits,
        routing=expected.routing(case, batch),
        renormalize=case.renormalize,
        activation=case.activation,
        recipe=how,
    )


class Seen:
    """An evaluator that only keeps what it was given."""

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        self.inputs = inputs
        return torch.zeros(1, 1, 1)


def faulty(fault: Fault, inputs: Inputs) -> Inputs:
    seen = Seen()
    contributions(fault, inputs, seen)
    return seen.inputs


def scales(inputs: Inputs, name: str) -> torch.Tensor:
    """[E, N, G], the buffer as vLLM keeps it but for repeated block rows."""
    found = [getattr(expert, name).scale for expert in inputs.loaded]
    return torch.stack(found)


def test_flat_index_takes_element_e_of_the_first_experts_channels() -> None:
    inputs = inputs_of(CHANNEL)
    wrong = faulty(Fault.W_SCALE_FLAT_INDEX, inputs)
    for name in ("w13", "w2"):
        buffer = scales(inputs, name)
        for e in range(4):
            assert (scales(wrong, name)[e] == buffer[0, e, 0]).all()
    assert torch.equal(scales(faulty(Fault.W13_SCALE_FLAT_INDEX, inputs), "w2"), scales(inputs, "w2"))


def test_neighbour_and_roll() -> None:
    inputs = inputs_of(CHANNEL)
    assert torch.equal(scales(faulty(Fault.W13_SCALE_OF_NEIGHBOUR_EXPERT, inputs), "w13"), scales(inputs, "w13").roll(-1, 0))
    assert torch.equal(scales(faulty(Fault.W2_CHANNEL_ROLLED, inputs), "w2")[:, 1:], scales(inputs, "w2")[:, :-1])


def test_transposed_blocks_hold_the_same_scales_in_the_order_of_the_other_axis() -> None:
    inputs = inputs_of(BLOCK)
    right, wrong = scales(inputs, "w13")[:, ::128], scales(faulty(Fault.W13_SCALE_TRANSPOSED, inputs), "w13")[:, ::128]
    rows, columns = right.shape[1:]
    assert (rows, columns) == (4, 3)
    for i in range(rows):
        for j in range(columns):
            assert torch.equal(wrong[:, i, j], right.flatten(1)[:, j * rows + i])
    assert sorted(wrong.flatten().tolist()) == sorted(right.flatten().tolist())


def test_halves() -> None:
    inputs = inputs_of(CHANNEL)
    gate, up = scales(inputs, "w13").chunk(2, 1)
    assert torch.equal(scales(faulty(Fault.GATE_SCALE_FOR_UP, inputs), "w13"), torch.cat([gate, gate], 1))
    assert torch.equal(scales(faulty(Fault.UP_SCALE_FOR_GATE, inputs), "w13"), torch.cat([up, up], 1))
    swapped = faulty(Fault.GATE_UP_SWAPPED, inputs).loaded[1].w13
    assert torch.equal(swapped.codes, torch.cat(inputs.loaded[1].w13.codes.chunk(2)[::-1]))


def test_per_tensor_halves_keep_the_checkpoints_codes_under_the_larger_scale() -> None:
    inputs = inputs_of(TENSOR)
    gate, up = inputs.experts[0].gate, inputs.experts[0].up
    assert gate is not None
    assert gate.scale is not None
    assert up.scale is not None
    wrong = faulty(Fault.MAX_SCALE_WITHOUT_REQUANT, inputs).loaded[0].w13
    assert torch.equal(wrong.codes, torch.cat([gate.codes.double(), up.codes.double()]))
    assert wrong.scale is not None
    assert set(wrong.scale.flatten().tolist()) == {max(float(gate.scale), float(up.scale))}


def test_a_dynamic_scale_left_out_or_doubled_changes_no_code() -> None:
    inputs = inputs_of(TOKEN)
    scale = inputs.hidden_states.double().abs().amax(1, keepdim=True) / 127
    honest = evaluate(inputs)
    assert honest.shape == (8, 1, 128)
    missing = faulty(Fault.A1_SCALE_NOT_APPLIED, inputs).hidden_states
    twice = faulty(Fault.A1_SCALE_APPLIED_TWICE, inputs).hidden_states
    assert torch.allclose(missing, inputs.hidden_states / scale)
    assert torch.allclose(twice, inputs.hidden_states * scale)
    first = faulty(Fault.A_SCALE_OF_TOKEN_ZERO, inputs).hidden_states
    assert torch.allclose(first, inputs.hidden_states / scale * scale[0])


def test_faults_of_what_was_contributed() -> None:
    inputs = inputs_of(CHANNEL)
    honest = evaluate(inputs)
    last = inputs.routing.topk_ids == 3

    def given(fault: Fault) -> torch.Tensor:
        return contributions(fault, inputs, evaluate)

    assert not given(Fault.ZERO_OUTPUT).any()
    assert torch.equal(given(Fault.STALE_ROW)[-1], honest[0])
    assert not given(Fault.TAIL_COLUMNS_DROPPED)[..., 96:].any()
    assert torch.equal(given(Fault.TAIL_COLUMNS_DROPPED)[..., :96], honest[..., :96])
    assert not given(Fault.LAST_EXPERT_DROPPED)[last].any()
    assert torch.equal(given(Fault.LAST_EXPERT_DROPPED)[~last], honest[~last])
    assert torch.equal(given(Fault.ROUTER_WEIGHT_TWICE), honest * inputs.routing.topk_weights.unsqueeze(2))
    expert, channel = target(honest, inputs.routing)
    assert torch.equal(given(Fault.CHANNEL_GAIN_1_05), gained(honest, inputs.routing, 1.05, expert, channel))


def test_a_bias_that_is_not_permuted_arrives_where_marlin_looks_for_another() -> None:
    first = [0, 1, 8, 9, 16, 17, 24, 25]  # marlin_utils.py, get_scale_perms: the channels of a thread's first eight places
    got = unpermuted(torch.arange(64.0), 1)
    assert got[first].tolist() == list(range(8))
    assert sorted(got.tolist()) == list(range(64))
    gate, up = unpermuted(torch.arange(1.0, 97.0), 2).chunk(2)  # halves of 48 are padded to whole tiles: zeros come to channels
    assert gate[first].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert up[first].tolist() == [49, 50, 51, 52, 53, 54, 55, 56]
    assert int((gate == 0).sum()) == int((up == 0).sum()) > 0


def test_group_scales_in_the_order_of_channel_scales_arrive_where_marlin_looks_for_others() -> None:
    rows = torch.arange(128.0).unsqueeze(1) + torch.tensor([[0.0, 1000.0]])
    got = in_order_of_channels(rows)
    places = [got[i + 8 * j, 0].item() for i in range(2) for j in range(8)]  # get_scale_perms: channels of the first 16 places of groups
    assert places == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]  # what lies there in the order of channels
    assert torch.equal(got[:, 1], got[:, 0] + 1000)
    assert sorted(got[:64, 0].tolist()) == list(range(64))
    assert int((in_order_of_channels(rows[:32] + 1)[:, 0] == 0).sum()) == 16  # padded to a tile: zeros come to channels
    assert torch.equal(in_order_of_groups(got[:64]), rows[:64])  # the one undoes the other
    assert [in_order_of_groups(rows)[i, 0].item() for i in (0, 1, 8, 9)] == [0, 8, 16, 24]
    inputs = inputs_of(MARLIN_GROUPS, Entry.LAYER, Backend.MARLIN)
    wrong = faulty(Fault.W13_SCALES_IN_ORDER_OF_CHANNELS, inputs)
    assert torch.equal(scales(wrong, "w2"), scales(inputs, "w2"))
    assert torch.equal(scales(wrong, "w13")[0, :8, 1], scales(inputs, "w13")[0, [0, 2, 4, 6, 32, 34, 36, 38], 1])


def test_small_scales_are_flushed_and_large_ones_stay_at_the_largest() -> None:
    scales_of = torch.tensor([2.0**-15, 2.0**-14, 1.0, 2.0**15, 2.0**16], dtype=torch.float64)
    assert as_e5m0(scales_of).tolist() == [0.0, 2.0**-14, 1.0, 2.0**15, 2.0**15]
    inputs = inputs_of(HUMMING, Entry.LAYER, Backend.HUMMING)
    wrong = faulty(Fault.SMALL_SCALES_FLUSHED, inputs)
    for name in ("w13", "w2"):
        before, after = scales(inputs, name), scales(wrong, name)
        assert torch.equal(after[after > 0], before[before >= 2.0**-14])
    assert int((scales(wrong, "w13") == 0).sum()) > 0


@pytest.mark.parametrize(
    ("fault", "case", "lane"),
    [
        (Fault.W13_SCALES_IN_ORDER_OF_CHANNELS, MARLIN_GROUPS, Backend.MARLIN),
        (Fault.W13_SCALES_IN_ORDER_OF_GROUPS, MARLIN_GROUP, Backend.MARLIN),
        (Fault.SMALL_SCALES_FLUSHED, HUMMING, Backend.HUMMING),
        (Fault.ROUNDED_AT_A_QUARTER, QUARTERS, Backend.HUMMING),
    ],
    ids=lambda value: value.id if isinstance(value, MoECase) else value.value if isinstance(value, Backend) else value.name,
)
def test_a_fault_of_a_lane_that_the_fake_does_not_play_is_told_and_named(fault: Fault, case: MoECase, lane: Backend) -> None:
    inputs, checkpoint, batch = inputs_of(case, Entry.LAYER, lane), make_checkpoint(case), make_batch(case)
    answer = expected.expected(case, inputs.recipe, checkpoint, batch)

    def signature(fault: Fault | None) -> tuple[Outcome, str]:
        output = contributions(fault, inputs, evaluate).sum(1).to(torch_dtype(answer.output))
        verdict = judge.judge(case, inputs.recipe, checkpoint, batch, answer, output, compare(answer, output))
        return verdict.outcome, verdict.signature.partition("@")[0]

    assert signature(None) == (Outcome.PASS, "")
    assert signature(fault) == (Outcome.MISMATCH, fault.name)


def test_a_fault_of_tiny_results_is_named_beside_honest_roundings_that_are_larger() -> None:
    inputs, checkpoint, batch = inputs_of(QUARTERS, Entry.LAYER, Backend.HUMMING), make_checkpoint(QUARTERS), make_batch(QUARTERS)
    answer = expected.expected(QUARTERS, inputs.recipe, checkpoint, batch)
    wrong = contributions(Fault.ROUNDED_AT_A_QUARTER, inputs, evaluate).sum(1)
    row = int((wrong == answer.expected).all(1).nonzero()[0])
    output = wrong.index_copy(0, torch.tensor([row]), answer.high[row : row + 1]).to(torch_dtype(answer.output))
    verdict = judge.judge(QUARTERS, inputs.recipe, checkpoint, batch, answer, output, compare(answer, output))
    assert verdict.signature == "ROUNDED_AT_A_QUARTER"
    assert verdict.fits[0].residual > NEAR


def test_float32_biases_read_as_16_bits_come_from_the_wrong_expert_too() -> None:
    biases = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert read_as_16_bits(biases, 0, Format.BF16).tolist() == [0.0, 1.0]
    assert read_as_16_bits(biases, 1, Format.BF16).tolist() == [0.0, 2.0]


def test_two_faults_at_once() -> None:
    inputs = inputs_of(replace(CHANNEL, bias=True))
    both = with_all((Fault.BIAS_DROPPED, Fault.ROUTER_WEIGHT_TWICE), inputs, evaluate)
    one = contributions(Fault.BIAS_DROPPED, inputs, evaluate)
    assert torch.equal(both, one * inputs.routing.topk_weights.unsqueeze(2))


def test_a_gain_touches_its_expert_and_channel_only() -> None:
    routing = Routing(topk_ids=torch.tensor([[0, 1], [1, 2]]), topk_weights=torch.ones(2, 2, dtype=torch.float64))
    given = torch.ones(2, 2, 3)
    assert gained(given, routing, 2.0, 1).tolist() == [[[1] * 3, [2] * 3], [[2] * 3, [1] * 3]]
    assert gained(given, routing, 2.0, 1, 2).tolist() == [[[1] * 3, [1, 1, 2]], [[1, 1, 2], [1] * 3]]


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_that_applies_can_be_evaluated_and_moves_the_reference(fault: Fault) -> None:
    moved = 0
    here = [(case, inputs_of(case)) for case in (CHANNEL, BLOCK, TENSOR, TOKEN, replace(CHANNEL, bias=True, renormalize=False))]
    on_input = replace(MARLIN, top_k=1, renormalize=False, router_weight_on_input=True)
    there = [(case, inputs_of(case, Entry.LAYER, Backend.MARLIN)) for case in (MARLIN, on_input, MARLIN_GROUPS, MARLIN_GROUP)]
    there += [(case, inputs_of(case, Entry.LAYER, Backend.HUMMING)) for case in (HUMMING, QUARTERS)]
    of_layers = [(case, inputs_of(case, Entry.LAYER)) for case in (ZERO_POINTS, SYMMETRIC, NIBBLES, LIMITED)]
    for case, inputs in (*here, *there, *of_layers):
        if applicable(fault, case, inputs.recipe):
            assert not torch.equal(contributions(fault, inputs, evaluate).sum(1), evaluate(inputs).sum(1))
            moved += 1
        else:
            assert why_not(fault, case, inputs.recipe)
    assert moved or fault is Fault.RENORMALIZE_FLIPPED


@pytest.mark.parametrize("case", [CHANNEL, BLOCK, TENSOR, TOKEN])
def test_the_fake_is_near_the_reference_and_not_the_reference(case: MoECase) -> None:
    how = recipe(case, Entry.FUSED_EXPERTS, Backend.INTERPRETER)
    subject = FakeSubject()
    loaded = subject.load(case, Entry.FUSED_EXPERTS, make_checkpoint(case))
    ran = subject.run(loaded, make_batch(case))
    reference = expected.expected(case, how, make_checkpoint(case), make_batch(case)).expected
    assert ran.output.dtype is make_batch(case).hidden_states.dtype
    assert ran.gemm_dtypes == (("int8",) * 2 if "int8" in case.id else ("float8_e4m3fn",) * 2)
    error = (ran.output.double() - reference).norm() / reference.norm()
    assert 0 < float(error) < 0.01


def test_a_subject_says_which_fault_it_has() -> None:
    assert FakeSubject().name == "fake"
    assert FakeSubject(Fault.STALE_ROW).name == "fake with STALE_ROW"


def test_two_faults_at_once_are_said_in_words() -> None:
    fit = FaultFit(fault="BIAS_NOT_PERMUTED+ROUTER_WEIGHT_TWICE", experts=(), residual=0.3)
    text = _fits((fit,))
    assert Fault.BIAS_NOT_PERMUTED.value in text
    assert Fault.ROUTER_WEIGHT_TWICE.value in text
