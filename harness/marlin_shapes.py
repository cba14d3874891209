"""Which shapes of packed layers Marlin's kernels take: ``marlin_utils.py``, ``marlin_moe_wna16/ops.cu`` (0.33.0)."""

from __future__ import annotations

from cases.case import MoECase
from harness.families import Family, ct_mxfp4, family
from harness.installed import BLACKWELL, compute_capability
from references.vocabulary import CheckpointFormat


def fits(case: MoECase) -> bool:
    """marlin_utils.py, check_moe_marlin_supports_config, with its tiles padded."""
    return case.hidden % 128 == 0 and (case.weight_scale.width is None or case.intermediate % case.weight_scale.width == 0)


def moe_wna16(case: MoECase) -> bool:
    """Whether AutoGPTQ's or AutoAWQ's method hands the layer to moe_wna16: where Marlin's kernels do not fit it, asked for or not."""
    return case.checkpoint in (CheckpointFormat.GPTQ, CheckpointFormat.AWQ) and not fits(case)


def microscaled(case: MoECase, lane: str) -> bool:
    """Whether kernels with E8M0 scales run: compressed-tensors MXFP4 has them whatever is asked for."""
    if ct_mxfp4(case) and compute_capability() not in BLACKWELL:
        return True
    return lane == "marlin" and family(case) in (Family.MXFP4, Family.MXFP8)


def shapes(case: MoECase) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of w13 and w2 as Marlin gets them: compressed-tensors MXFP4 is not padded, others to 256s and 128s."""
    hidden, intermediate = case.hidden, case.intermediate
    if family(case) is Family.MXFP8:
        intermediate = -(-intermediate // 64) * 64
    elif not ct_mxfp4(case):
        hidden, intermediate = -(-hidden // 256) * 256, -(-intermediate // 128) * 128
    return ((1 + case.activation.gated) * intermediate, hidden), (hidden, intermediate)


def tiled(rows: int, columns: int) -> bool:
    """marlin_moe_wna16/ops.cu: 128 columns and 64 rows, or 64 columns and 128 rows, at a time."""
    return (columns % 128 == 0 and rows % 64 == 0) or (columns % 64 == 0 and rows % 128 == 0)
