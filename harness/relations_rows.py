"""Relations that change the order or the number of experts and tokens, or nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from cases.batch import Batch
from cases.bits import permutation
from cases.perturb import Spot, rename_experts
from harness.relations_check import Setting, Variant
from harness.relations_scales import changed


def reference(setting: Setting) -> Iterator[Variant]:
    """Nothing is done; the check itself asks for the reference's bits."""
    yield Variant(change="nothing changed", setting=setting, reuse=True)


def repeated(setting: Setting) -> Iterator[Variant]:
    """The same once more, loaded again, and after another layer of the same sizes."""
    yield Variant(change="the loaded layer run once more", setting=setting, reuse=True)
    yield Variant(change="the layer loaded again", setting=setting)
    other = changed(setting, (Spot(expert=setting.case.experts - 1, projection="down_proj"), 0.25))
    yield Variant(change="the loaded layer run once more, after another was loaded and run", setting=setting, reuse=True, between=other)


def permuted_experts(setting: Setting) -> Iterator[Variant]:
    """Experts renumbered: rotated by one, and shuffled."""
    experts = setting.case.experts
    for change, order in (
        ("experts renumbered by one", [(e + 1) % experts for e in range(experts)]),
        ("experts shuffled", permutation(f"{setting.case.id} experts renumbered", experts).tolist()),
    ):
        yield Variant(change=change, setting=_renumbered(setting, order))


def permuted_tokens(setting: Setting) -> Iterator[Variant]:
    """Tokens in reverse order, and shuffled."""
    tokens = setting.case.tokens
    for change, rows in (
        ("tokens in reverse order", torch.arange(tokens).flip(0)),
        ("tokens shuffled", permutation(f"{setting.case.id} tokens", tokens)),
    ):
        yield Variant(change=change, setting=with_rows(setting, rows), rows=rows)


def dropped_tokens(setting: Setting) -> Iterator[Variant]:
    """Every second token kept, then the last alone."""
    tokens = setting.case.tokens
    for change, rows in (
        ("every second token dropped", torch.arange(0, tokens, 2)),
        ("all tokens but the last dropped", torch.tensor([tokens - 1])),
    ):
        if len(rows) < tokens:
            yield Variant(change=change, setting=with_rows(setting, rows), rows=rows)


def multiplied_tokens(setting: Setting) -> Iterator[Variant]:
    """Enough copies to leave naive block assignment (tokens * k * 4 <= E, fused_moe.py ``_prepare_expert_assignment``), or two."""
    case = setting.case
    copies = max(2, case.experts // (4 * case.tokens * case.top_k) + 1)
    rows = torch.arange(case.tokens).repeat(copies)
    yield Variant(change=f"every token {copies} times", setting=with_rows(setting, rows), rows=rows)


def with_rows(setting: Setting, rows: torch.Tensor) -> Setting:
    """The setting with these tokens."""
    batch = setting.batch
    chosen = Batch(
        hidden_states=batch.hidden_states[rows],
        router_logits=batch.router_logits[rows],
        topk_weights=None if batch.topk_weights is None else batch.topk_weights[rows],
        topk_ids=None if batch.topk_ids is None else batch.topk_ids[rows],
    )
    return replace(setting, case=replace(setting.case, tokens=len(rows)), batch=chosen)


def _renumbered(setting: Setting, new_index: list[int]) -> Setting:
    batch, index = setting.batch, torch.tensor(new_index)
    logits = torch.empty_like(batch.router_logits)
    logits[:, index] = batch.router_logits
    ids = None if batch.topk_ids is None else index[batch.topk_ids]
    return replace(
        setting,
        checkpoint=rename_experts(setting.checkpoint, new_index),
        batch=replace(batch, router_logits=logits, topk_ids=ids),
    )
