from __future__ import annotations

import pytest

from cases.batch import Batch
from cases.case import Entry, Level, MoECase
from cases.checkpoint import Checkpoint
from cases.generate import pairs
from harness import matrix, refusals_architecture
from harness.architectures import ARCHITECTURES, VARIABLE
from harness.backends import Backend
from harness.commands.matrix import architectures
from harness.exits import Misuse
from harness.installed import compute_capability, ue8m0_scales
from harness.ledger import Ledger, Standing
from harness.load_ledger import judge_loading
from harness.load_only import load_pair
from harness.recipes import recipe
from harness.subject import Loaded, LoadFailed, Ran
from harness.suite.options import Options
from harness.verdict import Outcome, Verdict

SM90, SM100, SM80 = ARCHITECTURES["sm90"], ARCHITECTURES["sm100"], ARCHITECTURES["sm80"]
SIZES = "e2k1m2h128i128-balanced"
BLOCK = MoECase.from_id(f"e4m3fn-block128-dyngroup128-ct-silu-bf16-{SIZES}")
CHANNEL = MoECase.from_id(f"e4m3fn-channel-dyntoken-ct-silu-bf16-{SIZES}")
PLAIN = MoECase.from_id(f"bf16-none-none-plain-silu-bf16-{SIZES}")
QUARK = MoECase.from_id(f"e4m3fn-channel-dyntoken-quark-silu-bf16-{SIZES}")


class Says:
    """A subject that loads as told."""

    name = "told"

    def __init__(self, answer: str | LoadFailed) -> None:
        self.answer = answer

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        if isinstance(self.answer, LoadFailed):
            raise self.answer
        return Loaded(handle=None, quant_method="Method", experts_class=self.answer)

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        raise AssertionError("nothing runs")


def verdict(case: MoECase, backend: Backend, answer: str | LoadFailed, architecture: str = "sm90") -> Verdict:
    return load_pair(case, backend, ARCHITECTURES[architecture], Says(answer)).verdict


def test_one_case_for_each_way_of_quantizing() -> None:
    chosen = matrix.ways()
    keys = [(c.checkpoint, c.origin, c.weight if c.quantized else None, c.weight_scale, c.act_scale, c.activation.gated) for c in chosen]
    assert len(set(keys)) == len(keys) > 30
    every = {(c.checkpoint, c.weight_scale, c.act_scale) for c, entry in pairs(Level.NIGHTLY) if entry is Entry.LAYER}
    assert {(c.checkpoint, c.weight_scale, c.act_scale) for c in chosen} == every
    assert sum(c.hidden % 128 == 0 and c.intermediate % 128 == 0 for c in chosen) > len(chosen) // 2


def test_what_is_declared_is_refused() -> None:
    refused = "ValueError: since kernel does not support quantization scheme QuantKey(...)"
    assert verdict(BLOCK, Backend.FLASHINFER_CUTLASS, LoadFailed(refused, refused=True), "sm100").outcome is Outcome.UNSUPPORTED
    assert verdict(CHANNEL, Backend.TRITON, LoadFailed(refused, refused=True), "sm80").outcome is Outcome.UNSUPPORTED
    nowhere = LoadFailed("ValueError: since kernel does not support current device interpreter.", refused=True)
    assert verdict(BLOCK, Backend.DEEP_GEMM, nowhere, "sm80").outcome is Outcome.UNSUPPORTED
    assert verdict(CHANNEL, Backend.HUMMING_A8, "HummingIndexedExperts", "sm80").outcome is Outcome.PASS


def test_what_is_not_declared_is_news() -> None:
    refused = LoadFailed("ValueError: since kernel does not support quantization scheme QuantKey(...)", refused=True)
    assert verdict(BLOCK, Backend.FLASHINFER_CUTLASS, refused, "sm90").outcome is Outcome.LOAD_ERROR
    assert verdict(CHANNEL, Backend.TRITON, refused, "sm89").outcome is Outcome.LOAD_ERROR


def test_a_declared_refusal_that_did_not_happen() -> None:
    found = verdict(BLOCK, Backend.FLASHINFER_CUTLASS, "FlashInferExperts", "sm100")
    assert (found.outcome, found.signature) == (Outcome.RUN_ERROR, "NOT_REFUSED")
    assert "block scales on sm90 only" in found.claim


def test_a_refusal_of_the_forward_is_none_of_loading() -> None:
    case = MoECase.from_id(f"e4m3fn-block128-dyngroup128-ct-silu-fp32-{SIZES}")
    assert verdict(case, Backend.TRITON, "TritonExperts").outcome is Outcome.PASS


def test_another_class_was_chosen() -> None:
    found = verdict(CHANNEL, Backend.HUMMING, "TritonExperts")
    assert (found.outcome, found.signature) == (Outcome.RUN_ERROR, "WRONG_CLASS:TritonExperts")
    assert verdict(CHANNEL, Backend.CUTLASS, "TritonOrCutlassExperts").outcome is Outcome.PASS
    assert verdict(CHANNEL, Backend.CUTLASS, "TritonOrDeepGemmExperts").outcome is Outcome.RUN_ERROR


def test_the_default_depends_on_the_architecture() -> None:
    assert refusals_architecture.classes(PLAIN, Backend.MARLIN, SM90) == {"TritonExperts"}
    assert "TrtLlmBf16ExpertsMonolithic" in refusals_architecture.classes(PLAIN, Backend.MARLIN, SM100)
    assert refusals_architecture.classes(PLAIN, Backend.MARLIN, ARCHITECTURES["sm120"]) == {"FlashInferExperts"}
    assert refusals_architecture.classes(PLAIN, Backend.HUMMING, SM80) == {"TritonExperts"}


def test_an_operator_that_needs_the_gpu_is_where_it_ends() -> None:
    needs = "compiled operator _C::gptq_marlin_repack has no CPU implementation in the interpreter lane: NotImplementedError: ..."
    result = load_pair(CHANNEL, Backend.MARLIN, SM90, Says(LoadFailed(needs)))
    assert (result.verdict.outcome, result.extras["stops_at"]) == (Outcome.PASS, "_C::gptq_marlin_repack")
    assert verdict(CHANNEL, Backend.MARLIN, LoadFailed("KeyError: 'weight_scale'")).outcome is Outcome.LOAD_ERROR
    other = verdict(CHANNEL, Backend.HUMMING, LoadFailed(needs))
    assert (other.outcome, other.signature) == (Outcome.RUN_ERROR, "WRONG_CLASS:MarlinExperts")


def test_the_ledger_speaks_of_loading_where_its_entry_does() -> None:
    from harness import ledger

    known: Ledger = ledger.load(ledger.LEDGER)
    raised = verdict(QUARK, Backend.HUMMING, LoadFailed("AssertionError: "))
    loads = verdict(QUARK, Backend.HUMMING, "HummingIndexedExperts")
    assert judge_loading(known, raised, QUARK, Backend.HUMMING).standing is Standing.KNOWN
    assert judge_loading(known, loads, QUARK, Backend.HUMMING).standing is Standing.STOPPED_FAILING
    early = verdict(QUARK, Backend.HUMMING, LoadFailed("AssertionError: Input must be on CUDA device"))
    assert judge_loading(known, early, QUARK, Backend.HUMMING).standing is Standing.CLEAN
    forward = MoECase.from_id(f"int8-channel-static-quark-silu-bf16-{SIZES}")
    assert judge_loading(known, loads, forward, Backend.TRITON).standing is Standing.CLEAN


def test_marlin_instead_of_what_was_forced_is_known_of_mxfp4_by_its_class() -> None:
    from harness import ledger

    case = MoECase.from_id("e2m1-group32-none-ct-silu-bf16-e8k2m33h256i128-balanced")
    needs = "compiled operator _C::gptq_marlin_repack has no CPU implementation in the interpreter lane: NotImplementedError: ..."
    found = verdict(case, Backend.DEEP_GEMM, LoadFailed(needs))
    assert judge_loading(ledger.load(ledger.LEDGER), found, case, Backend.DEEP_GEMM).standing is Standing.KNOWN


def test_architectures_are_named_or_all() -> None:
    assert [each.name for each in architectures(["sm100", "sm90", "sm100"])] == ["sm100", "sm90"]
    assert architectures(["all"]) == tuple(ARCHITECTURES.values())
    with pytest.raises(Misuse, match="sm80, sm89"):
        architectures(["hopper"])


def asked(architecture: str | None, backend: str | None = None, *cases: str) -> Options:
    return Options.parse(
        backend=backend, level="smoke", cases=cases, entry=None, subject="vllm", records="nowhere", expression="", architecture=architecture
    )


def test_an_architecture_that_was_asked_for() -> None:
    lane, loads = asked("sm100"), asked("sm100", "marlin")
    assert (lane.backend, lane.machine, lane.loads_only) == (Backend.INTERPRETER, Backend.INTERPRETER, False)
    assert (loads.backend, loads.machine, loads.loads_only) == (Backend.MARLIN, Backend.INTERPRETER, True)
    assert {pair.entry for pair in loads.pairs()} == {Entry.LAYER}
    assert loads.related() == ()
    unasked = asked(None, "marlin")
    assert (unasked.machine, unasked.loads_only) == (Backend.MARLIN, False)
    with pytest.raises(Misuse, match="unknown architecture 'sm70'; the interpreter platform answers as sm80"):
        asked("sm70")


def test_this_process_answers_as_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm80")
    assert compute_capability() == 80
    (refusal,) = refusals_architecture.declared(CHANNEL, Entry.LAYER, Backend.INTERPRETER)
    assert "sm89" in refusal.reason
    assert refusals_architecture.declared(CHANNEL, Entry.FUSED_EXPERTS, Backend.INTERPRETER) == ()
    monkeypatch.setenv(VARIABLE, "sm100")
    assert compute_capability() == 100
    assert refusals_architecture.declared(CHANNEL, Entry.LAYER, Backend.INTERPRETER) == ()
    assert ("ue8m0" in recipe(BLOCK, Entry.LAYER, Backend.INTERPRETER).name) == ue8m0_scales()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("MOEDIFF_LANE", "interpreter")
    assert compute_capability() == 0
