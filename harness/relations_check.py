"""Checking an exact relation: the predicted bits against the bits that came, and a message for whoever reads that they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from cases.batch import Batch, make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint, make_checkpoint
from cases.lattice_proof import Proof, prove
from harness import expected
from harness.backends import Backend
from harness.compare import attributes, bits, compare, show
from harness.recipes import recipe
from harness.relations import Relation, unprovable

if TYPE_CHECKING:
    from harness.subject.views import View
    from references.moe import Answer, Routing
    from references.vocabulary import Recipe


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One pair with its lattice layer and batch: where relations start."""

    case: MoECase
    entry: Entry
    backend: Backend
    checkpoint: Checkpoint
    batch: Batch
    proven: bool = True  # False: numbers made for a comparison between two runs, which the reference need not have one answer for

    @classmethod
    def of(cls, case: MoECase, entry: Entry, backend: Backend) -> Setting:
        """Raises InvalidCase for sizes the lattice is not laid out for."""
        return cls(case=case, entry=entry, backend=backend, checkpoint=make_checkpoint(case), batch=make_batch(case))

    @property
    def recipe(self) -> Recipe:
        """What runs."""
        return recipe(self.case, self.entry, self.backend)

    @cached_property
    def routing(self) -> Routing:
        """What the entry is given or computes."""
        return expected.routing(self.case, self.batch, given=self.recipe.router_weight_exact)

    @cached_property
    def proof(self) -> Proof | None:
        """The one honest output; None where relations.unprovable says so. Raises InvalidCase where it should be provable and is not."""
        how = self.recipe
        if not self.proven or unprovable(self.case, how) is not None:
            return None
        return prove(expected.experts(self.case, self.checkpoint), self.batch.hidden_states, self.routing, self.case.activation, how)

    @cached_property
    def answer(self) -> Answer:
        """The reference's value and interval of every element."""
        return expected.expected(self.case, self.recipe, self.checkpoint, self.batch)

    def tokens_of(self, expert: int) -> torch.Tensor:
        """[M] bool: rows routed to ``expert``."""
        return (self.routing.topk_ids == expert).any(1)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One thing done to a setting, and what it must do to the output.

    rows: [M'] row of the start's output that each row of the variant's repeats; None: its own.
    region: [M', H] bool, what may move; None: nothing. factor: by which all of it is multiplied; None: the reference says.
    start: what the output is compared with; None: the relation's own setting.
    views: scale tensors handed over in another form, by name (harness/subject/views.py); start_views: the start's too.
    may_refuse: a refusal with a reason holds the relation too.
    reuse: the start's loaded layer is run, nothing is loaded; between: another layer is loaded and run first.
    """

    change: str
    setting: Setting
    where: str = "nothing"
    rows: torch.Tensor | None = None
    region: torch.Tensor | None = None
    factor: float | None = None
    start: Setting | None = None
    views: Mapping[str, View] = field(default_factory=dict)
    start_views: Mapping[str, View] = field(default_factory=dict)
    may_refuse: bool = False
    reuse: bool = False
    between: Setting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A relation that did not hold. ``differing`` of ``of`` elements; values are decimal with bits in hexadecimal."""

    relation: Relation
    change: str
    claim: str  # the part of the relation that broke
    predicted: str  # the region that should have moved, and how
    moved: str  # the region that did
    differing: int
    of: int
    index: tuple[int, ...]
    expected: str
    actual: str

    def __str__(self) -> str:
        at = f"token {self.index[0]}, channel {self.index[1]}" if len(self.index) == 2 else "attributes"
        return (
            f"{self.relation}: {self.change}\n"
            f"  claim      {self.claim}; {self.differing} of {self.of} elements are not identical\n"
            f"  predicted  {self.predicted}\n"
            f"  moved      {self.moved}\n"
            f"  first      {at}: expected {self.expected}, actual {self.actual}"
        )


def check(relation: Relation, variant: Variant, before: torch.Tensor, after: torch.Tensor) -> Broken | None:
    """Whether ``after``, the variant's output [M', H], stands to ``before``, its start's [M, H], as the relation says.

    Outside the region every bit is that of ``before``; inside it is ``factor`` times that, or what the reference proves.
    Where the reference is what predicts, or knows the factor too, its whole output is asked for: there a zero's sign does not count.
    Where it has no single answer, every element must lie in its interval.
    """
    rows = torch.arange(before.shape[0]) if variant.rows is None else variant.rows
    held = before[rows]
    if differing := attributes(after, held.shape, held.dtype):
        return _broken(relation, variant, "shape, dtype and device stay", held, None, detail="; ".join(differing))
    region = torch.zeros(held.shape, dtype=torch.bool) if variant.region is None else variant.region
    predicted = held if variant.factor is None else torch.where(region, held * variant.factor, held)
    known = ~region if variant.factor is None else torch.ones_like(region)
    outside = torch.where(known, predicted, after)
    if not bits(outside, after).identical:
        claim = "everything outside the region is bit for bit what it was"
        if variant.factor is not None and bool((_differ(predicted, after) & region).any()):
            claim = f"the region is exactly {variant.factor:g} times what it was, and the rest bit for bit what it was"
        return _broken(relation, variant, claim, outside, after, start=held)
    if relation is not Relation.REFERENCE and variant.region is None:
        return None
    proof = variant.setting.proof
    if proof is None:
        answer = variant.setting.answer
        nearest = torch.where(compare(answer, after).bad, answer.expected.to(after.dtype), after)
        if not torch.equal(nearest, after):
            return _broken(relation, variant, "every element lies among the results an honest kernel may give", nearest, after, start=held)
    elif not torch.equal(proof.output + 0.0, after + 0.0):
        return _broken(relation, variant, "the output is the one that the reference proves", proof.output, after, start=held)
    return None


def _differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[M, H] bool: numbers that are not equal; NaN equals NaN."""
    return (left != right) & ~(torch.isnan(left) & torch.isnan(right))


def _broken(
    relation: Relation,
    variant: Variant,
    claim: str,
    wanted: torch.Tensor,
    after: torch.Tensor | None,
    *,
    start: torch.Tensor | None = None,
    detail: str = "",
) -> Broken:
    how = f"{variant.where}, by exactly {variant.factor:g}" if variant.factor is not None else variant.where
    if after is None or start is None:
        return Broken(
            relation=relation, change=variant.change, claim=claim, predicted=how, moved=detail, differing=wanted.numel(), of=wanted.numel(),
            index=(), expected="", actual=detail,
        )  # fmt: skip
    wrong = _differ(wanted, after)
    if not bool(wrong.any()):  # zeros of another sign
        wrong = torch.signbit(wanted) != torch.signbit(after)
    index = tuple(int(i) for i in wrong.nonzero()[0])
    return Broken(
        relation=relation,
        change=variant.change,
        claim=claim,
        predicted=how,
        moved=describe(_differ(start, after), variant.setting.routing.topk_ids),
        differing=int(wrong.sum()),
        of=wrong.numel(),
        index=index,
        expected=show(wanted[index]),
        actual=show(after[index]),
    )


def describe(moved: torch.Tensor, topk_ids: torch.Tensor) -> str:
    """Elements that moved, [M, H] bool, in words: by the experts of the tokens, then by token, and by channel."""
    if not bool(moved.any()):
        return "nothing"
    rows, columns = moved.any(1), moved.any(0)
    experts = [e for e in range(int(topk_ids.max()) + 1) if bool((topk_ids == e).any())]
    whole = [e for e in experts if bool(rows[(topk_ids == e).any(1)].all())]
    those = next(([e] for e in whole if torch.equal((topk_ids == e).any(1), rows)), whole)
    explained = torch.equal(torch.isin(topk_ids, torch.tensor(those)).any(1), rows)
    exact = f"the tokens of expert{'s' if len(those) > 1 else ''} {_numbers(those)}" if explained and those else ""
    tokens = "all tokens" if bool(rows.all()) else exact or f"tokens {_numbers(rows.nonzero().flatten().tolist())}"
    channels = "all channels" if bool(columns.all()) else f"channels {_numbers(columns.nonzero().flatten().tolist())}"
    return f"{tokens}, {channels} ({int(moved.sum())} of {moved.numel()} elements)"


def _numbers(numbers: list[int]) -> str:
    """``0, 3-7, 9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
