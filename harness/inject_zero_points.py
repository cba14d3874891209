"""Codes [N, K] from which another zero point was subtracted than the checkpoint means.

Source: GPTQ stores a zero point less one; a symmetric checkpoint of four bits holds 7 and means 8 (vLLM 0.33.0, ``auto_gptq.py``).
"""

from __future__ import annotations

import torch

from references.formats import decode, limits
from references.loading import Matrix
from references.moe import Expert
from references.scales import over_columns


def less_the_middle(matrix: Matrix, expert: Expert, *, down: bool) -> torch.Tensor:
    """Codes less the middle of their range. ``matrix``: the w13 or w2 (``down``) of ``expert``, zero points subtracted."""
    parts = [expert.down] if down else [part for part in (expert.gate, expert.up) if part is not None]
    points = torch.cat([decode(part.zero_point, part.format) for part in parts if part.zero_point is not None])
    middle = (limits(parts[0].format).max + 1.0) / 2.0
    return matrix.codes + over_columns(points, matrix.width, matrix.codes.shape[1]) - middle


def less_the_stored(codes: torch.Tensor) -> torch.Tensor:
    """Codes less the zero point of a symmetric GPTQ checkpoint as stored."""
    return codes + 1.0
