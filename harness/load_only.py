"""A layer chosen, loaded and converted for a GPU that is not here: a pair's stages up to the forward, on the interpreter platform.

Conversion ends where it first calls a compiled operator that the CPU has no stand-in for; that far it is plain torch or Triton, and
the same code that runs on the GPU.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import judge
from harness.backends import SPECS
from harness.load_stop import needs_gpu
from harness.pipeline import PairResult
from harness.refusals_architecture import classes, refusals
from harness.subject import LoadFailed
from harness.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from harness.architectures import Architecture
    from harness.backends import Backend
    from harness.subject import Subject

_OWNERS = {"marlin": "Marlin", "deep_gemm": "DeepGemm"}  # operators of one backend alone are named after it, and so are its classes
_EITHER = re.compile(r"TritonOr(\w+)")  # wrappers that choose per batch are named after the kernels that were asked for


def load_pair(case: MoECase, backend: Backend, architecture: Architecture, subject: Subject) -> PairResult:
    """Build and load the case's layer. What vLLM raises becomes an outcome; what we get wrong propagates."""
    extras: dict[str, object] = {"architecture": architecture.name}
    checkpoint = make_checkpoint(case)
    began = time.perf_counter()
    try:
        loaded = subject.load(case, Entry.LAYER, checkpoint)
    except LoadFailed as error:
        verdict = _raised(case, backend, architecture, error, extras)
    else:
        extras |= {"quant_method": loaded.quant_method, "experts_class": loaded.experts_class}
        verdict = _loaded(case, backend, architecture, loaded.experts_class)
    return PairResult(verdict=verdict, timings={"load": time.perf_counter() - began}, extras=extras)


def _raised(case: MoECase, backend: Backend, architecture: Architecture, error: LoadFailed, extras: dict[str, object]) -> Verdict:
    for refusal in refusals(case, backend, architecture):
        if refusal.matches(error.detail):
            return judge.refused(refusal, error.detail)
    if stop := needs_gpu(error.detail):
        extras["stops_at"] = stop
        wanted = classes(case, backend, architecture)
        if (owner := next((name for name in _OWNERS if name in stop), None)) and not any(_OWNERS[owner] in name for name in wanted):
            return judge.wrong_class(f"{_OWNERS[owner]}Experts", wanted)
        claim = f"chosen for {architecture.name} and loaded as far as {stop}, which needs the GPU"
        return Verdict(outcome=Outcome.PASS, claim=claim, detail=error.detail)
    return judge.raised(Outcome.LOAD_ERROR, error.detail)


def _loaded(case: MoECase, backend: Backend, architecture: Architecture, chosen: str) -> Verdict:
    for refusal in refusals(case, backend, architecture):
        if refusal.reasoned and not refusal.at_run:
            return judge.not_refused(refusal.reason)
    wanted = classes(case, backend, architecture)
    if not chosen_as(chosen, wanted, backend):
        return judge.wrong_class(chosen, wanted)
    return Verdict(outcome=Outcome.PASS, claim=f"{chosen}, chosen for {architecture.name}, loaded and converted; nothing ran")


def chosen_as(chosen: str, wanted: frozenset[str], backend: Backend) -> bool:
    """Whether the class chosen is one wanted, or the backend's own that chooses per batch between it and Triton's."""
    either = _EITHER.fullmatch(chosen)
    own = wanted | SPECS[backend].expert_classes[Entry.LAYER]
    return chosen in wanted or bool(either and any(name.startswith(either[1].removesuffix("Experts")) for name in own))
