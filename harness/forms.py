"""What becomes of every shape and stride of a scale tensor handed to ``fused_experts``, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from cases.case import Entry, Level, MoECase
from cases.lattice_pairs import lattice_pairs
from harness.backends import Backend
from harness.exact import BUILDERS, Drive, identify, reasoned
from harness.relations import Relation, asked
from harness.relations_check import check
from harness.subject import SubjectError
from harness.subject.views import Shape, Strides

if TYPE_CHECKING:
    from harness.subject import Subject

IDENTICAL, REFUSED = "identical", "refused"
_MARKS = {IDENTICAL: "=", REFUSED: "r"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of one tensor of one pair. came_of_it: ``identical``, ``refused``, or the signature of the fault that explains it."""

    case: MoECase
    tensor: str
    shape: Shape
    strides: Strides
    came_of_it: str
    reason: str = ""  # vLLM's, of a refusal


def cases(backend: Backend) -> tuple[MoECase, ...]:
    """One of each pairing of formats and layouts: of the smoke level's, the one with most experts."""
    found: dict[tuple[str, str, str], MoECase] = {}
    for case, entry in lattice_pairs(Level.SMOKE):
        if entry is Entry.FUSED_EXPERTS and Relation.SCALE_VIEWS in asked(case, entry, backend):
            layouts = case.weight, case.weight_scale, case.act_scale
            if layouts not in found or found[layouts].experts < case.experts:
                found[layouts] = case
    return tuple(found.values())


def forms(case: MoECase, subject: Subject, backend: Backend) -> Iterator[Form]:
    """Raises SubjectError where the subject may not refuse."""
    drive = Drive(subject)
    setting = drive.setting(case, Entry.FUSED_EXPERTS, backend)
    for variant in BUILDERS[Relation.SCALE_VIEWS](setting):
        ((tensor, how),) = variant.views.items()
        came, reason = IDENTICAL, ""
        try:
            before, after = drive.before(variant, setting), drive.after(variant, setting)
        except SubjectError as error:
            if not reasoned(error):
                raise
            came, reason = REFUSED, error.detail
        else:
            if check(Relation.SCALE_VIEWS, variant, before, after) is not None:
                came = identify(variant, after) or "UNEXPLAINED"
        yield Form(case=case, tensor=tensor, shape=how.shape, strides=how.strides, came_of_it=came, reason=reason)


def render(found: Sequence[Form]) -> Table:
    """A row per pairing and tensor, a column per shape; marks in the order of Strides."""
    shapes = [shape for shape in Shape if any(form.shape is shape for form in found)]
    title = (
        "Scale tensors handed to fused_experts: = identical, r refused with a reason, ≠ not identical, · no such form.\n"
        f"In this order: {'; '.join(strides.value for strides in Strides)}"
    )
    columns = ("format", "scale of weights", "of activations", "tensor", *(shape.value.replace("[", "\\[") for shape in shapes))
    table = Table(*columns, title=title, title_justify="left")
    grouped: dict[tuple[MoECase, str], list[Form]] = defaultdict(list)
    for form in found:
        grouped[form.case, form.tensor].append(form)
    for (case, tensor), those in grouped.items():
        cells = ["".join(_mark(those, shape, strides) for strides in Strides).rstrip() for shape in shapes]
        table.add_row(case.weight, case.weight_scale, case.act_scale, tensor, *cells)
    return table


def _mark(those: Sequence[Form], shape: Shape, strides: Strides) -> str:
    came = next((form.came_of_it for form in those if (form.shape, form.strides) == (shape, strides)), None)
    return "·" if came is None else _MARKS.get(came, "≠")
