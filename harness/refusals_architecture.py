"""What vLLM is expected to refuse in this process, or for a GPU architecture that is not here, and which kernels it takes there."""

from __future__ import annotations

from cases.case import Entry, MoECase
from cases.packed import is_packed
from harness import refusals_packed
from harness.architectures import Architecture, answering_as, requested
from harness.backends import SPECS, Backend, declared_refusal, experts_expected, refusals_on
from harness.refusals import Refusal, quark_int8_static


def declared(case: MoECase, entry: Entry, backend: Backend) -> tuple[Refusal, ...]:
    """What vLLM is expected to refuse in this process: the table's word, and the architecture's where one was asked for."""
    asked = requested()
    if asked is not None and entry is Entry.LAYER:
        return refusals(case, backend, asked)
    refusal = declared_refusal(case, entry, backend)
    return () if refusal is None else (refusal,)


def refusals(case: MoECase, backend: Backend, architecture: Architecture) -> tuple[Refusal, ...]:
    """Every declared refusal of the layer entry that applies there; vLLM gives the first reason it finds."""
    if quark_int8_static(case):
        return ()
    if is_packed(case):  # what they say of architectures is in refusals_packed.py, by compute_capability()
        packed = refusals_packed.refusal(case, backend)
        return () if packed is None else (packed,)
    every = (*SPECS[backend].refusals, *refusals_on(backend, architecture))
    return tuple(refusal for refusal in every if refusal.applies(case, Entry.LAYER))


def classes(case: MoECase, backend: Backend, architecture: Architecture) -> frozenset[str]:
    """Class names of which one must have been chosen there."""
    with answering_as(architecture.name):
        return experts_expected(case, Entry.LAYER, backend)
