from __future__ import annotations

import pytest

from cases.case import Level, MoECase
from cases.checkpoint import make_checkpoint
from harness.cli import main
from harness.commands.show import on_disk
from harness.exits import Exit
from harness.pairs import select

WAYS = {  # the smallest layer of each way to be stored
    (c.checkpoint, c.origin, c.stored, c.weight_scale, c.act_scale, c.activation.interleaved): c.id
    for c in sorted({pair.case for pair in select(Level.SMOKE)}, key=lambda c: -c.experts * c.hidden * c.intermediate)
}


@pytest.mark.parametrize("text", sorted(WAYS.values()))
def test_shapes_are_those_of_the_checkpoint_that_is_made(text: str) -> None:
    case = MoECase.from_id(text)
    made, (told, config) = make_checkpoint(case), on_disk(case)
    mine = {name: tensor for name, tensor in made.tensors.items() if name.startswith("0.") or not name[0].isdigit()}
    assert {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in mine.items()} == told
    assert made.quantization_config == config


def test_no_layer_is_too_large_to_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "int4-group128-none-ct-silu-bf16-e8k1m2h16384i16384-balanced", "--backend", "marlin"]) == Exit.AS_THE_LEDGER_SAYS
    assert "[16384, 2048]" in capsys.readouterr().out
