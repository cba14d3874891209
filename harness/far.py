"""Layers and batches whose offsets pass 2^31 elements, made of small ones: memory is shared until it reaches the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from cases.axes import Routing
from cases.batch import Batch, make_batch
from cases.checkpoint import Checkpoint, make_checkpoint

if TYPE_CHECKING:
    from cases.case import MoECase

PAST = 2**31
_SIZE = 2048  # H and I: an expert's down_proj is 4 Mi elements
_LOADING = 4  # times the weights: what loading and repacking may hold at once
_CHOSEN = 8.0  # logit of the expert that a token goes to, the others' being 0
_PERIOD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Far:
    """A layer, the batches to run through it, and the device memory it takes. period: rows after which a batch repeats.

    small: the case of one such period.
    """

    case: MoECase
    small: MoECase
    checkpoint: Checkpoint
    batches: tuple[Batch, ...]
    bytes_needed: int
    period: int = 0


def far_expert(case: MoECase) -> Far:
    """Expert 0 and the last, which begins past 2^31 elements of w2, are copies; all between are copies of another.

    The first batch goes to expert 0, the second, of the same tokens, to the last.
    """
    plain = replace(case, renormalize=True, router_weight_on_input=False, routing=Routing.BALANCED)
    small = replace(plain, experts=2, top_k=1, tokens=4, hidden=_SIZE, intermediate=_SIZE)
    experts = PAST // _SIZE**2 + 8
    far = replace(small, experts=experts)
    first = make_checkpoint(small)
    names: dict[str, list[tuple[str, torch.Tensor]]] = {"0": [], "1": []}
    for name, tensor in first.tensors.items():
        expert, _, rest = name.partition(".")
        names[expert].append((rest, tensor))
    tensors = {f"{e}.{rest}": tensor for e in range(experts) for rest, tensor in names["0" if e in (0, experts - 1) else "1"]}
    batch = make_batch(small)
    return Far(
        case=far,
        small=small,
        checkpoint=replace(first, tensors=tensors),
        batches=tuple(_to(batch, expert, experts) for expert in (0, experts - 1)),
        bytes_needed=_LOADING * 3 * PAST * (2 if not case.quantized or case.stored is not case.weight else 1),
    )


def _to(batch: Batch, expert: int, experts: int) -> Batch:
    logits = torch.zeros(batch.hidden_states.shape[0], experts)
    logits[:, expert] = _CHOSEN
    return Batch(hidden_states=batch.hidden_states, router_logits=logits)


def far_rows(case: MoECase) -> Far:
    """So many tokens that the intermediate of w13, [M * k, 2I or I], has more than 2^31 elements. The tokens repeat."""
    plain = replace(case, router_weight_on_input=False, routing=Routing.BALANCED)
    small = replace(plain, experts=8, top_k=8, tokens=_PERIOD, hidden=256, intermediate=4096)
    copies = PAST // (small.top_k * small.w13_rows * _PERIOD) + 8
    far = replace(small, tokens=_PERIOD * copies)
    batch = make_batch(small)
    many = Batch(hidden_states=batch.hidden_states.repeat(copies, 1), router_logits=batch.router_logits.repeat(copies, 1))
    rows = far.tokens * far.top_k
    needed = 8 * rows * far.w13_rows
    return Far(case=far, small=small, checkpoint=make_checkpoint(small), batches=(many,), bytes_needed=needed, period=_PERIOD)
