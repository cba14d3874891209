"""case, checkpoint, batch -> the reference's answer. The bridge that lets references never see a case."""

from __future__ import annotations

from cases.batch import Batch
from cases.case import MoECase, Origin
from cases.checkpoint import Checkpoint
from references.answer import answer
from references.checkpoint import read_experts
from references.moe import Answer, Expert, Routing
from references.routing import route
from references.vocabulary import Layout, Recipe


def experts(case: MoECase, checkpoint: Checkpoint) -> tuple[Expert, ...]:
    """The experts as the checkpoint's bytes say, before anything vLLM does to them."""
    online = case.origin is Origin.ONLINE  # on disk: hidden-dtype weights without scales
    return read_experts(
        checkpoint.tensors,
        checkpoint=case.checkpoint,
        experts=case.experts,
        gated=case.activation.gated,
        weight=case.dtype if online else case.weight,
        layout=Layout.NONE if online else case.weight_scale,
    )


def routing(case: MoECase, batch: Batch, *, given: bool = False) -> Routing:
    """Softmax top-k of the batch's router logits; ``given``: as tensors, where the batch has them (the functional entry)."""
    if given and batch.topk_weights is not None and batch.topk_ids is not None:
        return Routing(topk_ids=batch.topk_ids, topk_weights=batch.topk_weights.double(), exact=True)
    return route(batch.router_logits, case.top_k, case.renormalize)


def expected(case: MoECase, recipe: Recipe, checkpoint: Checkpoint, batch: Batch) -> Answer:
    """The reference evaluated on numbers and on intervals."""
    routed = routing(case, batch, given=recipe.router_weight_exact)
    return answer(experts(case, checkpoint), batch.hidden_states, routed, case.activation, recipe)
