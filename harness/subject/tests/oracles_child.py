"""What vLLM's oracles choose or refuse, in a process of its own: ``python -m harness.subject.tests.oracles_child STEP FIRST BACKEND...``.

Of all cases every STEP-th from FIRST on; 1 0 is all of them, minutes of it. Layers are built and never loaded, so that no conversion runs.
Prints a JSON line for each case whose answer is not the table's.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from cases.axes import ActScale, Entry, InvalidCase, Origin
from cases.case import MoECase, entry_takes
from cases.checkpoint import make_checkpoint
from harness.architectures import Architecture, requested
from harness.backends import SPECS, Backend, declared_refusal
from harness.families import ct_mxfp4
from harness.load_only import chosen_as
from harness.refusals_architecture import classes
from harness.subject import LoadFailed
from references.vocabulary import Activation, CheckpointFormat, Format, Layout


class Chosen(Exception):
    """The layer is built. ``args``: its module."""


def schemes() -> Iterator[MoECase]:
    """Every way of quantizing with every activation; small limits and router weights as they are with silu."""
    axes = (Format, Layout, ActScale, CheckpointFormat, Origin, Activation)
    for weight, scale, act, stored, origin, activation in itertools.product(*axes):
        plain = {"tight": False, "renormalize": True}
        options = [plain, plain | {"tight": True}, plain | {"renormalize": False}] if activation is Activation.SILU else [plain]
        for flags in options:
            try:
                case = MoECase(
                    experts=4,
                    top_k=2,
                    tokens=8,
                    hidden=256,
                    intermediate=256,
                    dtype=Format.BF16,
                    weight=weight,
                    weight_scale=scale,
                    act_scale=act,
                    checkpoint=stored,
                    origin=origin,
                    activation=activation,
                    **flags,
                )
            except InvalidCase:
                continue
            if entry_takes(case, Entry.LAYER):
                yield case


def difference(case: MoECase, backend: Backend, architecture: Architecture, said: str | None, chosen: str | None) -> str:
    """What of vLLM's answer is not the table's; "". ``said``: its refusal; ``chosen``: the experts, None where none tell."""
    refusal = declared_refusal(case, Entry.LAYER, backend)
    if said is not None:
        if refusal is None:
            return f"not declared: {said}"
        return "" if refusal.matches(said) else f"declared in other words ({refusal.says}): {said}"
    if refusal is not None and refusal.reasoned and not refusal.at_run and "has no CPU" not in refusal.says:
        return f"not refused: {refusal.reason}"
    wanted = classes(case, backend, architecture)
    if chosen is None or chosen_as(chosen, wanted, backend):
        return ""
    return "" if ct_mxfp4(case) else f"{chosen} was chosen, not {' or '.join(sorted(wanted))}"  # ct_mxfp4: in the ledger


def main(step: int, first: int, names: list[str]) -> None:
    """On every backend named, as the architecture that was asked for."""
    from harness.subject import vllm_compat
    from harness.subject.vllm_layer import VllmSubject

    architecture = requested()
    assert architecture is not None
    cases = [(case, make_checkpoint(case)) for case in itertools.islice(schemes(), first, None, step)]

    def built(module: Any, *_: object) -> None:
        raise Chosen(module)

    for backend in map(Backend, names):
        subject = VllmSubject(SPECS[backend].moe_backend, device="cpu", interpreter=True)
        vllm_compat.load_weights = built
        for case, checkpoint in cases:
            said = chosen = None
            try:
                subject.load(case, Entry.LAYER, checkpoint)
            except LoadFailed as error:
                if isinstance(error.__cause__, Chosen):
                    method = vllm_compat.experts_of(error.__cause__.args[0]).quant_method
                    experts = getattr(method, "experts_cls", None)
                    chosen = None if experts is None else experts.__name__
                else:
                    said = error.detail.strip().partition("\n")[0]
            if other := difference(case, backend, architecture, said, chosen):
                print(json.dumps([backend.value, case.id, other]), flush=True)  # noqa: T201
    print(json.dumps(["asked", len(cases) * len(names)]))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
