"""Batches: hidden states and router logits of a case."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cases.axes import Data, Routing
from cases.bits import bell, grid, permutation
from cases.case import MoECase
from cases.dense import TORCH_DTYPE
from cases.lattice import lattice_hidden_states, lattice_logits, lattice_weights
from cases.roles import empty_expert, tensor_scaled, zero_expert

_TOKENS_FOR_A_ZERO_ROW = 17
_EDGE_FLOOR = 0.5  # first and last column of every row, in units of the row's rms


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """hidden_states [M, H] hidden dtype; router_logits [M, E] fp32, no ties within 2**-10 at the top-k edge.

    topk_weights [M, k] fp32, topk_ids [M, k] int64: what an entry that takes routing as tensors is given; None: of the logits.
    """

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    topk_weights: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None


def make_batch(case: MoECase) -> Batch:
    """The case's batch, bit-identical on every machine.

    Raises:
        InvalidCase: for sizes the lattice is not laid out for.
    """
    if case.data is Data.LATTICE:
        chosen = chosen_experts(case)
        return Batch(
            hidden_states=lattice_hidden_states(case, _key(case), zero_row(case)),
            router_logits=lattice_logits(case, chosen),
            topk_weights=lattice_weights(case, _key(case)),
            topk_ids=chosen,
        )
    return Batch(hidden_states=_hidden_states(case), router_logits=_router_logits(case))


def zero_row(case: MoECase) -> int | None:
    """The token whose hidden state is all zero: neither first nor last; None for small batches."""
    if case.tokens < _TOKENS_FOR_A_ZERO_ROW:
        return None
    return 1 + int(permutation(f"{_key(case)} zero row", case.tokens - 2)[0])


def chosen_experts(case: MoECase) -> torch.Tensor:
    """[M, k] int64: the experts of each token, by design of the routing pattern; no order within a token."""
    last, zero, empty = case.experts - 1, zero_expert(case), empty_expert(case)
    first = [last] + ([zero] if zero is not None else [])  # in play however few tokens there are
    rest = [int(expert) for expert in permutation(f"{_key(case)} experts", case.experts)]
    order = first + [expert for expert in rest if expert not in first and expert != empty]
    tokens = range(case.tokens)

    def turn(experts: list[int], at: int, count: int) -> list[int]:
        return [experts[(at + slot) % len(experts)] for slot in range(count)]

    match case.routing:
        case Routing.BALANCED:
            rows = [turn(order, token * case.top_k, case.top_k) for token in tokens]
        case Routing.SINGLE:
            rows = [order[: case.top_k] for _ in tokens]
        case Routing.SKEWED:  # three of four tokens share the second expert
            hot, others = order[1 % len(order)], [expert for expert in order if expert != order[1 % len(order)]]
            rows = [
                [hot, *turn(others, token, case.top_k - 1)]
                if token % 4 and case.top_k <= len(others) + 1
                else turn(order, token, case.top_k)
                for token in tokens
            ]
        case Routing.ONE_EACH:
            others = order[1:]
            rows = [turn(others, token * case.top_k, case.top_k) for token in range(case.tokens - 1)]
            rows.append([last, *turn(others, case.tokens, case.top_k - 1)])
    return torch.tensor(rows, dtype=torch.int64)


def _key(case: MoECase) -> str:
    return f"batch m{case.tokens}h{case.hidden}e{case.experts}k{case.top_k}-s{case.seed}"


def _hidden_states(case: MoECase) -> torch.Tensor:
    values = bell(f"{_key(case)} hidden_states", (case.tokens, case.hidden))
    edges = values[:, [0, -1]]
    values[:, [0, -1]] = torch.where(edges < 0, -1.0, 1.0) * edges.abs().clamp(min=_EDGE_FLOOR)
    values *= _magnitudes(case).unsqueeze(1)
    row = zero_row(case)
    if row is not None:
        values[row] = 0
    return values.to(TORCH_DTYPE[case.dtype])


def _magnitudes(case: MoECase) -> torch.Tensor:
    """[M] float64: a ramp over 2**-4 .. 2, over 2**-1 .. 2 where one scale covers all tokens, in shuffled order; 1 for M == 1."""
    if case.tokens == 1:
        return torch.ones(1, dtype=torch.float64)
    low, high = (-1 if tensor_scaled(case) else -4), 1
    steps = permutation(f"{_key(case)} magnitudes", case.tokens).to(torch.float64)
    exponent = low + (high - low) * (steps + 0.5) / case.tokens
    whole = exponent.floor()
    return torch.ldexp(1 + (exponent - whole), whole.to(torch.int64))  # piecewise linear: no libm in the data


def _router_logits(case: MoECase) -> torch.Tensor:
    """Chosen experts in (1, 3), all different in the batch; the others in (-6, -2)."""
    logits = grid(f"{_key(case)} other logits", (case.tokens, case.experts), -6.0, -2.0)
    chosen = grid(f"{_key(case)} chosen logits", (case.tokens, case.top_k), 1.0, 3.0)
    return logits.scatter(1, chosen_experts(case), chosen).to(torch.float32)
