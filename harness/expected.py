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


def routing(case: MoECase, batch: Batch) -> Routing:
    """Softmax top-k of the batch's router logits."""
    return route(batch.router_logits, case.top_k, case.renormalize)


def expected(case: MoECase, recipe: Recipe, checkpoint: Checkpoint, batch: Batch) -> Answer:
    """The reference evaluated on numbers and on intervals."""
    return answer(experts(case, checkpoint), batch.hidden_states, routing(case, batch), case.activation, recipe)
