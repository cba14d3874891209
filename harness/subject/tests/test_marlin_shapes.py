"""Which shapes Marlin takes, against vLLM's own functions where Python has one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from cases.case import MoECase
from harness import marlin_shapes
from harness.architectures import VARIABLE

SIZES = (32, 64, 96, 128, 160, 192, 256, 320)
OF = "-e4k2m8h{}i{}-balanced"
GPT_OSS, MXFP8, CT_MXFP4 = (
    f"e2m1-group32-none-gptoss-swigluoai-bf16{OF}",
    f"e4m3fn-group32-dyngroup32-modelopt-silu-bf16{OF}",
    f"e2m1-group32-none-ct-silu-bf16{OF}",
)


def case(text: str, hidden: int, intermediate: int) -> MoECase:
    return MoECase.from_id(text.format(hidden, intermediate))


@pytest.mark.vllm
@pytest.mark.parametrize("group", [32, 64, 128])
def test_layers_of_words_fit_where_vllm_says(interpreter: None, group: int) -> None:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import check_moe_marlin_supports_config

    seen = set()
    for hidden, intermediate in itertools.product(SIZES, SIZES):
        if hidden % group or intermediate % group:
            continue
        config = SimpleNamespace(hidden_dim=hidden, intermediate_size_per_partition_unpadded=intermediate)
        wanted = check_moe_marlin_supports_config(config, group, allow_tile_padding=True)
        seen.add(wanted)
        for checkpoint in ("ct", "gptq"):
            layer = case(f"int4-group{group}-none-{checkpoint}-silu-bf16{OF}", hidden, intermediate)
            assert marlin_shapes.fits(layer) is wanted, layer.id
            assert marlin_shapes.moe_wna16(layer) is (checkpoint == "gptq" and not wanted)
    assert seen == ({True} if group == 128 else {True, False})


@pytest.mark.vllm
def test_layers_are_padded_as_vllm_pads_them(interpreter: None) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, mxfp4_round_up_hidden_size_and_intermediate_size
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_padded_intermediate

    for hidden, intermediate in itertools.product(SIZES, SIZES):
        h, i = mxfp4_round_up_hidden_size_and_intermediate_size(Mxfp4MoeBackend.MARLIN, hidden, intermediate)
        assert marlin_shapes.shapes(case(GPT_OSS, hidden, intermediate)) == ((2 * i, h), (h, i))
        i = marlin_moe_padded_intermediate(intermediate, 32)
        assert marlin_shapes.shapes(case(MXFP8, hidden, intermediate)) == ((2 * i, hidden), (hidden, i))
        assert marlin_shapes.shapes(case(CT_MXFP4, hidden, intermediate)) == ((2 * intermediate, hidden), (hidden, intermediate))


def test_a_matrix_is_of_whole_tiles_in_one_of_two_ways() -> None:
    """marlin_moe_wna16/ops.cu: thread_k and thread_n of 64 and 128, or of 128 and 64."""
    taken = {(rows, columns) for rows, columns in itertools.product((64, 96, 128, 192), repeat=2) if marlin_shapes.tiled(rows, columns)}
    assert taken == {(64, 128), (192, 128), (128, 64), (128, 192), (128, 128)}


def test_kernels_with_e8m0_scales_are_of_two_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    asked = [case(text, 128, 128) for text in (GPT_OSS, MXFP8, CT_MXFP4, f"int4-group32-none-ct-silu-bf16{OF}")]
    assert [marlin_shapes.microscaled(each, "marlin") for each in asked] == [True, True, True, False]
    assert [marlin_shapes.microscaled(each, "humming") for each in asked] == [False, False, True, False]
    monkeypatch.setenv(VARIABLE, "sm100")
    assert [marlin_shapes.microscaled(each, "humming") for each in asked] == [False] * 4
