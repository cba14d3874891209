"""A backend is forced and asserted: another class, a refusal nobody declared, a declared one that does not happen or has other words."""

from __future__ import annotations

from dataclasses import replace

from cases.batch import Batch
from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint
from harness.backends import Backend, declared_refusal
from harness.pipeline import run_pair
from harness.subject import Loaded, LoadFailed, Ran
from harness.subject.fake import FakeSubject
from harness.verdict import Outcome, Verdict

LANE = Backend.INTERPRETER
RUNS = MoECase.from_id("int8-channel-dyntoken-ct-silu-bf16-e2k1m2h128i128-balanced")
REFUSED = MoECase.from_id("int8-tensor-dyntensor-ct-silu-bf16-e2k1m2h128i128-balanced")


class Says(FakeSubject):
    """Honest, but of another class, or refusing in these words."""

    def __init__(self, experts_class: str = "", words: str = "") -> None:
        super().__init__(None, LANE)
        self.experts_class, self.words = experts_class, words

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        if self.words:
            raise LoadFailed(self.words, refused=True)
        return super().load(case, entry, checkpoint)

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        ran = super().run(loaded, batch)
        return replace(ran, experts_class=self.experts_class or ran.experts_class)


def verdict(case: MoECase, subject: Says) -> Verdict:
    return run_pair(case, Entry.LAYER, LANE, subject).verdict


def test_another_class_than_the_forced_backends_is_a_failure() -> None:
    assert verdict(RUNS, Says()).outcome is Outcome.PASS
    found = verdict(RUNS, Says("MarlinExperts"))
    assert (found.outcome, found.signature) == (Outcome.RUN_ERROR, "WRONG_CLASS:MarlinExperts")
    assert found.claim == "MarlinExperts ran where TritonExperts was forced"


def test_a_refusal_that_nobody_declared_is_a_failure() -> None:
    words = "ValueError: since kernel does not support quantization scheme QuantKey(...)."
    found = verdict(RUNS, Says(words=words))
    assert (found.outcome, found.detail) == (Outcome.LOAD_ERROR, words)


def test_a_declared_refusal_must_still_be_refused_and_keeps_its_reason() -> None:
    refusal = declared_refusal(REFUSED, Entry.LAYER, LANE)
    assert refusal is not None
    words = "RuntimeError: Unsupported FusedMoe scheme: num_bits=8"
    kept = verdict(REFUSED, Says(words=words))
    assert (kept.outcome, kept.detail) == (Outcome.UNSUPPORTED, words)
    assert refusal.reason in kept.claim
    ran = verdict(REFUSED, Says())
    assert (ran.outcome, ran.signature) == (Outcome.RUN_ERROR, "NOT_REFUSED")
    assert verdict(REFUSED, Says(words="ValueError: for another reason")).outcome is Outcome.LOAD_ERROR
