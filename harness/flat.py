"""The founding fault in words: which scale should have been used, and which element of the flattened buffer was (vllm#58532)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness import expected
from harness.compare import show
from references.loading import load

if TYPE_CHECKING:
    from harness.relations_check import Setting


def flat_elements(setting: Setting, cause: str, index: tuple[int, ...]) -> str:
    """One line per buffer that ``cause`` names, for the first expert of the element's token.

    ``w2_scale.flatten()[2] = 0.5 (0x3f000000) was used, not w2_scale[2, 7, 0] = ...``.
    """
    token, channel = index
    expert = int(setting.routing.topk_ids[token][0])
    loaded = load(expected.experts(setting.case, setting.checkpoint), setting.recipe)
    lines = []
    for name, fault, row in (("w13", "W13_", 0), ("w2", "W2_", channel)):
        if not cause.startswith((fault, "W_")):
            continue
        scales = [matrix.scale for matrix in (getattr(each, name) for each in loaded)]
        buffer = torch.stack([scale for scale in scales if scale is not None]).to(torch.float32)
        used, wanted = buffer.flatten()[expert], buffer[expert, row, 0]
        lines.append(f"  used       {name}_scale.flatten()[{expert}] = {show(used)}, not {name}_scale[{expert}, {row}, 0] = {show(wanted)}")
    return "\n".join(lines)
