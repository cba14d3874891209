"""Batches: hidden states and router logits of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """hidden_states [M, H] hidden dtype; router_logits [M, E] fp32, no ties within 2**-10 at the top-k edge."""

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
