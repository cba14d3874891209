"""Checks that only a GPU can fail, asked of a fake device: each holds when it is honest, and fails for the fault it is there for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cases.axes import Routing
from cases.batch import make_batch
from cases.case import Entry, Level, MoECase
from cases.checkpoint import make_checkpoint
from harness import device_asked, repeatable
from harness.backends import SPECS, Backend
from harness.device_asked import Broken, run_check
from harness.device_checks import CLAIMS, FAR, DeviceCheck, asked, of, why_not
from harness.environment import child_environ
from harness.expected import expected
from harness.far import PAST, Far, far_expert, far_rows
from harness.pairs import Pair
from harness.recipes import recipe
from harness.subject import HasModes, Loaded, LoadFailed, modes
from harness.tests.fake_device import FakeDevice, Planted
from harness.verdict import Outcome, Verdict
from references.moe import Answer
from references.vocabulary import CheckpointFormat, Format

PAIR = min(
    (each.pair for each in of(Level.SMOKE, Backend.TRITON) if each.check is DeviceCheck.SWAPPED_OPERANDS),
    key=lambda pair: (pair.case.hidden * pair.case.intermediate * pair.case.experts, pair.case.tokens),
)
NEAR = [check for check in DeviceCheck if check not in FAR]
CAUGHT = {
    Planted.READS_FRESH_MEMORY: {DeviceCheck.POISONED_MEMORY},
    Planted.LOADS_INTO_FRESH_MEMORY: {DeviceCheck.POISONED_MEMORY},
    Planted.RUNS_ON_ANOTHER_STREAM: {DeviceCheck.LAGGING_STREAM},
    Planted.LOADS_ON_ANOTHER_STREAM: {DeviceCheck.LAGGING_STREAM},
    Planted.HOST_SCALAR: {DeviceCheck.REPLAYED_SCALES},
    Planted.FIRST_BATCH: {DeviceCheck.REPLAYED_GRAPH},
    Planted.COMPILED_CONSTANT: {DeviceCheck.COMPILED_SCALES},
    Planted.UNSEEN: {DeviceCheck.REPLAYED_SCALES, DeviceCheck.COMPILED_SCALES},
    Planted.SWAPPED_ROWS: {DeviceCheck.SWAPPED_OPERANDS},
    Planted.UNSTEADY: {DeviceCheck.REPEATED_RUNS},
}


def ask(check: DeviceCheck, subject: FakeDevice, pair: Pair = PAIR) -> Verdict:
    assert isinstance(subject, HasModes)
    return run_check(check, pair, Backend.TRITON, subject).verdict


@pytest.mark.parametrize("check", NEAR)
def test_an_honest_device_passes(check: DeviceCheck) -> None:
    assert ask(check, FakeDevice()).outcome is Outcome.PASS


@pytest.mark.parametrize("planted", CAUGHT)
def test_each_fault_fails_its_check_and_names_the_place(planted: Planted) -> None:
    found = {check: ask(check, FakeDevice(planted)) for check in NEAR}
    assert {check for check, verdict in found.items() if verdict.outcome in (Outcome.NOT_IDENTICAL, Outcome.NONDETERMINISTIC)} >= CAUGHT[
        planted
    ]
    one = found[next(iter(CAUGHT[planted]))]
    assert one.signature == next(iter(CAUGHT[planted])).name
    assert "first at" in one.detail or "nothing moved" in one.detail


@pytest.mark.parametrize(("planted", "did"), [(Planted.RUNS_ON_ANOTHER_STREAM, "run"), (Planted.LOADS_ON_ANOTHER_STREAM, "loaded")])
def test_of_loading_and_running_on_a_stream_that_lags_only_the_one_that_broke_is_told(planted: Planted, did: str) -> None:
    verdict = ask(DeviceCheck.LAGGING_STREAM, FakeDevice(planted))
    assert verdict.detail.startswith(f"{did} on a stream that lags behind the host")
    assert "\n" not in verdict.detail


def test_only_its_own_check_fails_for_a_graph_that_holds_a_host_scalar() -> None:
    assert [check for check in NEAR if ask(check, FakeDevice(Planted.HOST_SCALAR)).outcome is not Outcome.PASS] == [
        DeviceCheck.REPLAYED_SCALES
    ]


def test_a_device_that_never_swaps_is_out_of_reach() -> None:
    assert ask(DeviceCheck.SWAPPED_OPERANDS, FakeDevice(swaps=False)).outcome is Outcome.UNAVAILABLE


def test_a_kernel_that_always_swaps_is_not_asked() -> None:
    """Seen on an H200: CUTLASS's W4A8 has no run that does not swap."""
    mixed = MoECase.from_id("int4-group128-dyntoken-ct-gelu_tanh-bf16-e4k1m17h256i256-balanced-norenorm-onin")
    fp8 = MoECase.from_id("e4m3fn-channel-dyntoken-ct-silu-bf16-e5k5m3h64i32-balanced-norenorm")
    told = [why_not(DeviceCheck.SWAPPED_OPERANDS, case, Entry.LAYER, Backend.CUTLASS, Level.NIGHTLY) for case in (mixed, fp8)]
    assert told == ["the path does not swap operands", None]


def test_operands_are_swapped_at_other_sizes_too() -> None:
    assert ask(DeviceCheck.SWAPPED_OPERANDS, FakeDevice()).detail == "operands swapped at 6 of 6 sizes"
    broken = ask(DeviceCheck.SWAPPED_OPERANDS, FakeDevice(Planted.SWAPPED_ROWS)).detail.splitlines()
    assert len(broken) == 6
    assert "M16 H256 I384: 1 elements differ" in broken[4]


def test_sizes_of_packed_layers_are_whole_tiles() -> None:
    case = MoECase.from_id("int4-group128-dyntoken-ct-gelu_tanh-bf16-e4k1m17h256i256-balanced-norenorm-onin")
    made = run_check(DeviceCheck.SWAPPED_OPERANDS, Pair(case, Entry.LAYER), Backend.CUTLASS, FakeDevice(backend=Backend.CUTLASS))
    assert made.verdict.detail == "operands swapped at 3 of 3 sizes"


def test_a_bit_that_the_reference_allows_is_noted_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_asked.Place, "honest", lambda self, output: True)
    told = ask(DeviceCheck.SWAPPED_OPERANDS, FakeDevice(Planted.SWAPPED_ROWS))
    assert told.outcome is Outcome.PASS
    assert "1 elements differ" in told.detail


@pytest.mark.parametrize(("pair_itself", "outcome"), [(True, Outcome.NOT_IDENTICAL), (False, Outcome.PASS)])
def test_two_wrong_outputs_at_another_size_are_told_unless_the_pair_itself_is_wrong(
    monkeypatch: pytest.MonkeyPatch, pair_itself: bool, outcome: Outcome
) -> None:
    monkeypatch.setattr(device_asked.Place, "honest", lambda self, output: pair_itself and self.case == PAIR.case)
    told = ask(DeviceCheck.SWAPPED_OPERANDS, FakeDevice(Planted.SWAPPED_ROWS))
    assert told.outcome is outcome
    assert "M16 H256 I384: 1 elements differ" in told.detail


def test_what_is_raised_while_runs_that_may_differ_are_judged_is_the_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeatable, "why_not", lambda case, entry, backend: "atomic additions")

    class Breaks(FakeDevice):
        def load(self, case, entry, checkpoint):  # type: ignore[no-untyped-def]
            if self._runs:
                raise LoadFailed("OutOfMemoryError: CUDA out of memory")
            return super().load(case, entry, checkpoint)

    told = ask(DeviceCheck.REPEATED_RUNS, Breaks(Planted.UNSTEADY))
    assert (told.outcome, told.detail) == (Outcome.LOAD_ERROR, "OutOfMemoryError: CUDA out of memory")


def test_a_run_that_asks_nobody_whether_to_swap_is_vacuous() -> None:
    class Deaf(FakeDevice):
        def run(self, loaded, batch):  # type: ignore[no-untyped-def]
            ran = super().run(loaded, batch)
            if not self._allowed:
                self._seen.clear()
            return ran

    told = ask(DeviceCheck.SWAPPED_OPERANDS, Deaf())
    assert (told.outcome, told.signature) == (Outcome.RUN_ERROR, "VACUOUS")
    assert told.detail == "the operands were asked for by nobody in the run that should not swap them"


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_far_rows_that_are_all_nothing_say_nothing(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    pair = next(each.pair for each in of(Level.NIGHTLY, Backend.TRITON) if each.check is DeviceCheck.FAR_ROWS)
    far = Far(
        case=pair.case, small=pair.case, checkpoint=make_checkpoint(PAIR.case), batches=(make_batch(PAIR.case),), bytes_needed=0, period=4
    )
    monkeypatch.setattr(device_asked, "far_rows", lambda case: far)

    class Nothing(FakeDevice):
        def load(self, case, entry, checkpoint):  # type: ignore[no-untyped-def]
            return Loaded(handle=None, quant_method="", experts_class="")

        def run(self, loaded, batch):  # type: ignore[no-untyped-def]
            return type("Ran", (), {"output": torch.full((16, 8), value)})()

    assert ask(DeviceCheck.FAR_ROWS, Nothing(), pair).signature == "VACUOUS"


def test_a_pair_declared_not_repeatable_must_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeatable, "why_not", lambda case, entry, backend: "atomic additions")
    told = ask(DeviceCheck.REPEATED_RUNS, FakeDevice(Planted.UNSTEADY))
    assert told.outcome is Outcome.MISMATCH
    assert "atomic additions" in told.claim


@pytest.mark.parametrize("check", FAR)
def test_a_device_too_small_is_said_to_be(check: DeviceCheck) -> None:
    told = ask(check, FakeDevice(free=2**30))
    assert (told.outcome, told.claim.partition(" GiB")[0].split()[:2]) == (Outcome.UNAVAILABLE, ["it", "needs"])


def test_far_layers_are_past_the_edge_and_share_their_memory_here() -> None:
    far = far_expert(PAIR.case)
    last = far.case.experts - 1
    assert last * far.case.hidden * far.case.intermediate > PAST
    assert far.checkpoint.tensors["0.down_proj.weight"] is far.checkpoint.tensors[f"{last}.down_proj.weight"]
    assert not torch.equal(far.checkpoint.tensors["0.down_proj.weight"], far.checkpoint.tensors["1.down_proj.weight"])
    assert [set(batch.router_logits.argmax(1).tolist()) for batch in far.batches] == [{0}, {last}]
    rows = far_rows(PAIR.case)
    assert rows.case.tokens * rows.case.top_k * rows.case.w13_rows > PAST
    assert torch.equal(rows.batches[0].hidden_states[: rows.period], rows.batches[0].hidden_states[-rows.period :])


@pytest.mark.parametrize("short", [False, True])
def test_offsets_of_32_bits_show_as_another_output_of_the_copy(monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    class Offsets(FakeDevice):
        """An output that says which expert's memory was read."""

        def load(self, case, entry, checkpoint):  # type: ignore[no-untyped-def]
            return replace(super().load(PAIR.case, entry, make_checkpoint(PAIR.case)), handle=case)

        def run(self, loaded, batch):  # type: ignore[no-untyped-def]
            expert = int(batch.router_logits.argmax(1)[0])
            wrapped = short and expert * loaded.handle.hidden * loaded.handle.intermediate >= PAST
            output = torch.ones(4, 8) * (2 if wrapped else 1)
            return type("Ran", (), {"output": output})()

    verdict = ask(DeviceCheck.FAR_EXPERT, Offsets())
    assert verdict.outcome is (Outcome.NOT_IDENTICAL if short else Outcome.PASS)


def _one_moved(answer: Answer, allowed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's output in bf16, and with one element at the other end of what is allowed, or far off."""
    low, one, high = (each.to(torch.bfloat16) for each in (answer.low, answer.expected, answer.high))
    at = tuple(int(i) for i in (low < high).nonzero()[0])
    moved = one.clone()
    moved[at] = (low if one[at] != low[at] else high)[at] if allowed else 2 * high[at] + 1
    return one, moved


@pytest.mark.parametrize(
    ("backend", "allowed", "outcome"),
    [
        (Backend.TRITON, True, Outcome.NOT_IDENTICAL),
        (Backend.MARLIN, True, Outcome.PASS),
        (Backend.MARLIN, False, Outcome.NOT_IDENTICAL),
    ],
)
def test_a_far_row_may_differ_where_that_is_declared_and_then_as_far_as_is_allowed(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, allowed: bool, outcome: Outcome
) -> None:
    """An element of one far copy at the other end of what is allowed, and far off. The reference's own answer stands for the layer."""
    pair = next(each.pair for each in of(Level.NIGHTLY, backend) if each.check is DeviceCheck.FAR_ROWS)
    small = replace(
        pair.case, experts=2, top_k=1, tokens=16, hidden=128, intermediate=128, routing=Routing.BALANCED, router_weight_on_input=False
    )
    checkpoint, batch = make_checkpoint(small), make_batch(small)
    answer = expected(small, recipe(small, pair.entry, backend), checkpoint, batch)
    one, moved = _one_moved(answer, allowed)
    many = torch.cat([one, one, moved, one])
    far = Far(case=replace(small, tokens=64), small=small, checkpoint=checkpoint, batches=(batch,), bytes_needed=0, period=16)
    monkeypatch.setattr(device_asked, "far_rows", lambda case: far)

    class Rows(FakeDevice):
        def run(self, loaded, batch):  # type: ignore[no-untyped-def]
            return type("Ran", (), {"output": many})()

    subject = Rows(backend=backend)
    assert isinstance(subject, HasModes)
    assert run_check(DeviceCheck.FAR_ROWS, pair, backend, subject).verdict.outcome is outcome


@pytest.mark.parametrize(
    ("backend", "allowed", "outcome"),
    [
        (Backend.TRITON, True, Outcome.NOT_IDENTICAL),
        (Backend.HUMMING_A8, True, Outcome.PASS),
        (Backend.HUMMING_A8, False, Outcome.NOT_IDENTICAL),
    ],
)
def test_a_far_copy_may_differ_where_that_is_declared_and_then_as_far_as_is_allowed(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, allowed: bool, outcome: Outcome
) -> None:
    """An element of the far copy's output at the other end of what is allowed, and far off."""
    pair = next(each.pair for each in of(Level.NIGHTLY, backend) if each.check is DeviceCheck.FAR_EXPERT)
    small = replace(
        pair.case,
        experts=2,
        top_k=1,
        tokens=4,
        hidden=128,
        intermediate=128,
        renormalize=True,
        routing=Routing.BALANCED,
        router_weight_on_input=False,
    )
    logits = torch.tensor([[8.0, 0.0]]).repeat(4, 1)
    near_batch = replace(make_batch(small), router_logits=logits)
    answer = expected(small, recipe(small, pair.entry, backend), make_checkpoint(small), near_batch)
    near, away = _one_moved(answer, allowed)
    batches = (near_batch, replace(near_batch, router_logits=logits.flip(1)))
    far = Far(case=small, small=small, checkpoint=make_checkpoint(small), batches=batches, bytes_needed=0)
    monkeypatch.setattr(device_asked, "far_expert", lambda case: far)

    class Copies(FakeDevice):
        def run(self, loaded, batch):  # type: ignore[no-untyped-def]
            return type("Ran", (), {"output": near if batch is near_batch else away})()

    assert run_check(DeviceCheck.FAR_EXPERT, pair, backend, Copies(backend=backend)).verdict.outcome is outcome


def test_a_pair_that_may_differ_from_run_to_run_is_asked_for_no_equality() -> None:
    case = MoECase.from_id("bf16-none-none-plain-gelu-bf16-e8k4m129h128i64-single")
    assert asked(case, Entry.BATCHED, Backend.BATCHED_TRITON, Level.NIGHTLY) == (DeviceCheck.REPEATED_RUNS,)
    assert len(asked(replace(case, top_k=2), Entry.BATCHED, Backend.BATCHED_TRITON, Level.NIGHTLY)) > 1


def test_every_check_has_a_claim_and_is_asked_somewhere() -> None:
    assert set(CLAIMS) == set(DeviceCheck) == set(device_asked.ASKED)
    assert {each.check for backend in Backend for each in of(Level.NIGHTLY, backend)} == set(DeviceCheck)


def test_scales_that_no_kernel_reads_are_not_changed_in_place() -> None:
    changed = (DeviceCheck.REPLAYED_SCALES, DeviceCheck.COMPILED_SCALES)
    asked = {
        backend: [each.pair.case for each in of(Level.SMOKE, backend) if each.check in changed]
        for backend in (Backend.TRITON, Backend.TRITON_UNFUSED, Backend.EMULATION, Backend.MARLIN)
    }
    assert not any(case.checkpoint is CheckpointFormat.GPT_OSS for backend in list(asked)[:2] for case in asked[backend])
    assert not {Format.INT4, Format.UINT4} & {case.weight for case in asked[Backend.EMULATION]}
    assert {Format.INT4, Format.UINT4} <= {case.weight for case in asked[Backend.MARLIN]}


def test_lanes_without_a_device_are_asked_nothing() -> None:
    assert {backend for backend in Backend if of(Level.NIGHTLY, backend)} <= {backend for backend in Backend if SPECS[backend].needs_gpu}
    assert of(Level.NIGHTLY, Backend.INTERPRETER) == ()
    assert not [each for each in of(Level.SMOKE, Backend.TRITON) if each.check in FAR]


def test_what_broke_is_told_in_one_line() -> None:
    broken = next(device_asked._same("a against b", torch.ones(2, 2), torch.tensor([[1.0, 2.0], [1.0, 1.0]])))
    assert isinstance(broken, Broken)
    assert str(broken) == "a against b: 1 elements differ, first at [0, 1]: expected 1 (0x3f800000), actual 2 (0x40000000)"


def test_collecting_them_imports_no_torch() -> None:
    code = "import sys, json; import harness.device_checks as d; from harness.backends import Backend; from cases.case import Level; "
    code += "n = len(d.of(Level.SMOKE, Backend.TRITON)); print(json.dumps([n, sorted({'torch', 'vllm'} & set(sys.modules))]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child_environ())
    count, heavy = json.loads(done.stdout)
    assert count > 50
    assert heavy == []


def test_scales_of_every_kind_are_doubled_in_place_and_nothing_else_is() -> None:
    power = torch.tensor([120, 127], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    held = {"w13_weight_scale": torch.ones(3), "w2_weight_scale_inv": torch.ones(2, dtype=torch.bfloat16), "w2_scale": power}
    kept = {"w13_input_scale": torch.ones(1), "a1_scale": torch.ones(1), "w13_weight": torch.ones(2), "empty_scale": torch.empty(0)}
    named = modes.scale_in_place(Loaded(handle=None, quant_method="", experts_class="", parameters=held | kept), 2.0)
    assert set(named) == set(held)
    assert [each.float().tolist() for each in held.values()] == [[2.0] * 3, [2.0] * 2, [2.0**-6, 2.0]]
    assert all(bool((each == 1).all()) for each in kept.values())
