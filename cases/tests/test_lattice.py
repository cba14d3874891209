from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from cases.axes import InvalidCase
from cases.batch import make_batch
from cases.case import Level, MoECase
from cases.checkpoint import make_checkpoint
from cases.lattice_pairs import lattice_cases
from references.formats import round_to
from references.vocabulary import Format, Layout

RELU2 = "int8-tensor-static-raw-relu2_no_mul-fp32-e4k1m3h64i32-balanced-lattice"


@pytest.mark.parametrize("case", lattice_cases(Level.SMOKE), ids=lambda case: case.id)
def test_every_scale_is_a_power_of_two_and_neighbours_differ(case: MoECase) -> None:
    tensors = make_checkpoint(case).tensors
    for name in case.projections:
        scales = [tensors[f"{e}.{name}.weight_scale"].flatten() for e in range(case.experts) if f"{e}.{name}.weight_scale" in tensors]
        for scale in scales:
            assert bool((torch.frexp(scale)[0] == 0.5).all())
            if case.weight_scale is Layout.CHANNEL:
                assert bool((scale[1:] != scale[:-1]).all())


def test_rationals_give_the_codes_sums_and_squares_that_fp32_holds() -> None:
    """A second proof, with fractions and integers only: no sum of GEMM 1 reaches 2**24, and every result is an fp32 number."""
    case = MoECase.from_id(RELU2)
    tensors, batch = make_checkpoint(case).tensors, make_batch(case)
    assert batch.topk_ids is not None
    a1 = max(Fraction(float(tensors[f"{e}.up_proj.input_scale"])) for e in range(case.experts))
    for token in range(case.tokens):
        expert = int(batch.topk_ids[token, 0])
        weight, scale = tensors[f"{expert}.up_proj.weight"], Fraction(float(tensors[f"{expert}.up_proj.weight_scale"]))
        codes = [Fraction(float(x)) / a1 for x in batch.hidden_states[token]]
        assert all(code.denominator == 1 and abs(code) <= 127 for code in codes)
        for row in weight.tolist():
            terms = [code * w for code, w in zip(codes, row, strict=True)]
            assert sum(map(abs, terms)) < 2**24
            squared = float((sum(terms) * a1 * scale) ** 2)
            assert float(round_to(torch.tensor(squared, dtype=torch.float64), Format.FP32)) == squared


def test_a_layer_too_small_for_the_special_columns_is_refused() -> None:
    case = MoECase.from_id("bf16-none-none-plain-silu-bf16-e4k1m3h16i32-balanced-lattice")
    with pytest.raises(InvalidCase, match="lattice data needs H >= 32, got 16"):
        make_checkpoint(case)
