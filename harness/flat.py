"""The founding fault (vllm#58532) in words: which scale should have been used, and which element of the flattened buffer was.

And the same load with its strides ignored: ``fused_moe_kernel`` reads ``b_scale_ptr + expert`` wherever activations are scaled per tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from harness import expected
from harness.compare import show
from harness.subject.views import View, view
from references.loading import LoadedExpert, load
from references.vocabulary import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.relations_check import Setting


def flat_elements(setting: Setting, cause: str, index: tuple[int, ...]) -> str:
    """One line per buffer that ``cause`` names, for the first expert of the element's token.

    ``w2_scale.flatten()[2] = 0.5 (0x3f000000), not w2_scale[2, 7, 0] = ...``; of w13, all of whose rows reach the element, the first
    row's that differs.
    """
    token, channel = index
    expert = int(setting.routing.topk_ids[token][0])
    loaded = load(expected.experts(setting.case, setting.checkpoint), setting.recipe)
    lines = []
    for name, fault in (("w13", "W13_"), ("w2", "W2_")):
        if not cause.startswith((fault, "W_")):
            continue
        scales = [matrix.scale for matrix in (getattr(each, name) for each in loaded)]
        buffer = torch.stack([scale for scale in scales if scale is not None]).to(torch.float32)
        used = buffer.flatten()[expert]
        row = channel if name == "w2" else int((buffer[expert, :, 0] != used).to(torch.int8).argmax())
        wanted = buffer[expert, row, 0]
        chance = ", by chance the same" if bool(used == wanted) else ""
        lines.append(
            f"  used       {name}_scale.flatten()[{expert}] = {show(used)}, not {name}_scale[{expert}, {row}, 0] = {show(wanted)}{chance}"
        )
    return "\n".join(lines)


def memory_scales(setting: Setting, views: Mapping[str, View]) -> tuple[LoadedExpert, ...]:
    """The experts as a kernel has them that scales expert e by memory element e from the start of each scale tensor handed to it."""
    loaded = load(expected.experts(setting.case, setting.checkpoint), setting.recipe)
    for name, buffer in (("w1_scale", "w13"), ("w2_scale", "w2")):
        matrices = [getattr(each, buffer) for each in loaded]
        scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
        stacked = torch.stack([scale[0, 0] for scale in scales] if setting.case.weight_scale is Layout.TENSOR else scales)
        given = view(stacked, views[name], matrices[0].codes.shape[0]) if name in views else stacked
        memory = given.as_strided((len(loaded),), (1,))
        loaded = tuple(
            replace(each, **{buffer: replace(getattr(each, buffer), scale=torch.full_like(scales[e], float(memory[e])))})
            for e, each in enumerate(loaded)
        )
    return loaded
