"""The founding fault (vllm#58532) as a table: static per-tensor activations, per-channel weights, one scale perturbed a row.

What a correct kernel gives is proven by the reference; so is what one gives that scales expert e by flat element e of the scale buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from cases.axes import InvalidCase
from cases.case import Entry, MoECase
from cases.perturb import Spot
from harness.backends import Backend
from harness.compare import show
from harness.exact import Drive, evaluate, inputs_of
from harness.faults import Fault
from harness.flat import flat_elements
from harness.inject import Inputs, contributions
from harness.relations_check import Setting, Variant, describe
from harness.relations_scales import DOWN, changed
from references.enclosure import enclose
from references.formats import round_to, torch_dtype
from references.vocabulary import Layout

if TYPE_CHECKING:
    from harness.subject import Subject

FAULT = Fault.W_SCALE_FLAT_INDEX
CASES = (
    "int8-channel-static-raw-relu2_no_mul-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
)
OPPOSITE = (  # per-token activations, per-tensor weights
    "int8-tensor-dyntoken-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-tensor-dyntoken-raw-relu2_no_mul-bf16-e4k1m8h64i32-balanced-lattice",
)


class Standing(StrEnum):
    """What the subject's output is."""

    CORRECT = "correct"
    FLAT_INDEX = "flat index"  # bit for bit what the fault gives
    NEITHER = "neither"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One perturbation. Values are decimal with bits in hexadecimal, of the first element that is not as it should be."""

    case: str
    change: str
    standing: Standing
    predicted: str  # what should move
    moved: str  # what did
    element: str = ""
    expected: str = ""
    actual: str = ""
    used: str = ""  # the scales that were used, and those that should have been


def rows(text: str, subject: Subject, backend: Backend = Backend.INTERPRETER) -> Iterator[Row]:
    """The layer as it is, and with each expert's scales and each of the first E flat elements of each buffer doubled.

    Raises:
        InvalidCase: the reference does not know the wrong values to the bit.
        SubjectError: the subject raised.
    """
    start, drive = Setting.of(MoECase.from_id(text), Entry.FUSED_EXPERTS, backend), Drive(subject)
    before = drive.start(start)[1]
    yield _row("nothing", start, start, before, before)
    for spot in spots(start.case):
        there = changed(start, (spot, 2.0))
        yield _row(f"{spot} times 2", start, there, before, drive.after(Variant(change="", setting=there), start))


def spots(case: MoECase) -> Iterator[Spot]:
    """W13's and W2's apart: every expert's, then the elements that a flat index takes."""
    for projection in case.projections:
        yield from (Spot(expert=e, projection=projection) for e in range(case.experts))
    for projection in (case.projections[0], DOWN) if case.weight_scale is Layout.CHANNEL else ():
        yield from (Spot(expert=0, projection=projection, element=e) for e in range(case.experts))


def wrong(setting: Setting) -> torch.Tensor:
    """[M, H]: what the fault gives, to the bit. Raises InvalidCase when more than one number is honest then."""
    seen: list[Inputs] = []

    def spy(given: Inputs) -> torch.Tensor:
        seen.append(given)
        return evaluate(given)

    how = setting.recipe
    output = round_to(contributions(FAULT, inputs_of(setting), spy).sum(1), how.output)
    bounds = enclose(seen[-1].loaded, seen[-1].hidden_states, seen[-1].routing, seen[-1].activation, how)
    low, high = (round_to(end, how.output) for end in (bounds.low, bounds.high))
    if not torch.equal(low, high) or not torch.equal(output, low):
        raise InvalidCase(f"{FAULT.name} can give more than one number in {setting.case.id}")
    return output.to(torch_dtype(how.output))


def _row(change: str, start: Setting, there: Setting, before: torch.Tensor, actual: torch.Tensor) -> Row:
    assert start.proof is not None
    assert there.proof is not None
    right, ids = there.proof.output, start.routing.topk_ids
    regions = start.proof.output != right, before != actual
    predicted, moved = (describe(region, ids) for region in regions)
    differing = right != actual
    if not bool(differing.any()):
        return Row(case=start.case.id, change=change, standing=Standing.CORRECT, predicted=predicted, moved=moved)
    telling = differing & (regions[0] != regions[1])  # moved, and should not have; or the reverse
    index = tuple(int(i) for i in (telling if bool(telling.any()) else differing).nonzero()[0])
    channels = start.case.weight_scale is Layout.CHANNEL
    return Row(
        case=start.case.id,
        change=change,
        standing=Standing.FLAT_INDEX if channels and torch.equal(wrong(there), actual) else Standing.NEITHER,
        predicted=predicted,
        moved=moved,
        element=f"token {index[0]}, channel {index[1]}",
        expected=show(right[index]),
        actual=show(actual[index]),
        used=flat_elements(there, FAULT.name, index) if channels else "",
    )


def render(found: Sequence[Row]) -> Table:
    """The table of one case."""
    table = Table("scale", "should move", "moved", "the output is", title=f"{found[0].case} through fused_experts", title_justify="left")
    for row in found:
        said = [row.standing.value]
        if row.element:
            said += [f"{row.element}:", f"expected {row.expected}, actual {row.actual}", *(line.strip() for line in row.used.splitlines())]
        table.add_row(row.change, row.predicted, row.moved, "\n".join(said))
    return table
