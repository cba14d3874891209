"""Layers divided among ranks: each rank must hold what its part of the checkpoint holds, and the ranks' outputs must add up.

All ranks are loaded in one process, one after another; nothing is reduced. The sum is taken in float64 and compared with the sum of the
intervals that the reference gives for each rank's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cases.axes import Entry
from cases.bad_checkpoints import CLAIMS, Bad
from cases.batch import make_batch
from cases.sharding import slice_of
from cases.shards import RANKS, Shard, common_width, whole_groups
from harness import load_oracles
from harness.backends import declared_refusal
from harness.compare import compare
from harness.expected import experts, routing
from harness.load_oracles import Finding, Oracle
from harness.recipes import recipe, written
from harness.refusals_architecture import declared
from harness.subject import LoadFailed, RunFailed
from harness.subject.loading import Depth
from harness.verdict import Outcome, Verdict
from references.answer import answer
from references.formats import round_to
from references.shards import shard
from references.vocabulary import CheckpointFormat, Layout

if TYPE_CHECKING:
    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.backends import Backend
    from harness.subject.loading import Loads
    from references.moe import Answer
    from references.vocabulary import Recipe

_SENTINELS = (0x7F, 0xFF)
_SHAPES = ("w13_weight_shape", "w2_weight_shape")  # the file's own, which nothing reads
_ONCE = (_SHAPES, (*_SHAPES, "w2_bias"))  # not compared on rank 0, and on the others: the sum holds the second bias once


def divided(case: MoECase, checkpoint: Checkpoint, backend: Backend, subject: Loads, extras: dict[str, object]) -> Iterable[Finding]:
    """Findings on a layer whose shards hold whole groups. Raises LoadFailed."""
    depth = Depth.DIRECTORY if case.checkpoint is CheckpointFormat.GPT_OSS else Depth.LAYER  # its model divides it, not the layer
    for rank in range(RANKS):
        smaller, part = slice_of(case, checkpoint, Shard(rank))
        alone = subject.watch_loading(smaller, part, depth=depth, sentinel=_SENTINELS[0])
        with subject.as_rank(rank, RANKS):
            mine = subject.watch_loading(case, checkpoint, depth=depth, sentinel=_SENTINELS[1])
        extras |= {"quant_method": mine.quant_method}
        expected, actual = (
            {name: tensor for name, tensor in seen.after.items() if name not in (_ONCE[rank > 0])} for seen in (alone, mine)
        )
        for finding in load_oracles.same(expected, actual, f"rank {rank} of {RANKS}"):
            yield replace(
                finding, oracle=Oracle.SHARD, what=_kind(finding.text), text=finding.text.replace("layer depth", "its slice alone")
            )
    if runs(case, backend):
        yield from adds_up(case, checkpoint, backend, subject)


def _kind(text: str) -> str:
    return text.partition(":")[0].partition(" ")[0]


def runs(case: MoECase, backend: Backend) -> bool:
    """Whether the lane runs the layer, by kernels for which there is a reference."""
    return declared_refusal(case, Entry.LAYER, backend) is None and written(case, Entry.LAYER, backend)


def adds_up(case: MoECase, checkpoint: Checkpoint, backend: Backend, subject: Loads) -> Iterator[Finding]:
    """Findings on the outputs of all ranks, each read from a directory by vLLM's own loader. Raises LoadFailed, RunFailed."""
    batch = make_batch(case)
    outputs = []
    for rank in range(RANKS):
        with subject.as_rank(rank, RANKS):
            loaded = subject.load_directory(case, checkpoint)
        outputs.append(subject.run(loaded, batch).output)
    answers = [answer_of(case, checkpoint, batch, backend, rank) for rank in range(RANKS)]
    total = sum((output.double() for output in outputs), start=torch.zeros(()).double())
    low = sum((round_to(each.low, each.output) for each in answers), start=torch.zeros(()).double())
    high = sum((round_to(each.high, each.output) for each in answers), start=torch.zeros(()).double())
    wrong = ~((low <= total) & (total <= high))
    if bool(wrong.any()):
        token, channel = (int(i) for i in wrong.nonzero()[0])
        text = (
            f"{int(wrong.sum())} of {wrong.numel()} sums of the {RANKS} ranks' outputs are not the layer's; first token {token}, channel "
            f"{channel}: expected {low[token, channel]:.6g} to {high[token, channel]:.6g}, actual {total[token, channel]:.6g}"
        )
        yield Finding(oracle=Oracle.SUM, what="output", text=text)


def _with_narrow_blocks(case: MoECase, how: Recipe) -> Recipe:
    """oracle/fp8.py, resolve_fp8_moe_weight_block_shape: blocks become so narrow that no rank cuts one, and activations follow; the fused
    SiLU and quantization is for blocks of 128 (experts/triton_moe.py)."""
    layout = common_width(case)
    assert layout is not None
    assert how.a1 is not None
    narrow = replace(how.a1, layout=layout)
    return replace(how, a1=narrow, a2=narrow, activation_store=case.dtype, gate_store=case.dtype)


def answer_of(case: MoECase, checkpoint: Checkpoint, batch: Batch, backend: Backend, rank: int) -> Answer:
    """The reference's for one rank's part."""
    how = recipe(case, Entry.LAYER, backend)
    if case.weight_scale is Layout.BLOCK128 and not whole_groups(case):
        how = _with_narrow_blocks(case, how)
    mine = shard(experts(case, checkpoint), rank, RANKS)
    return answer(mine, batch.hidden_states, routing(case, batch), case.activation, how)


_SAYS = re.compile(r"group.?size|block_[nk]|weight_scale|per.partition", re.IGNORECASE)  # what is cut, or the size that cuts it


def cut(case: MoECase, checkpoint: Checkpoint, backend: Backend, subject: Loads) -> Verdict:
    """On a layer of which a rank ends within a group of scales. Signatures: as bad_run's."""
    claim = f"{CLAIMS[Bad.CUT_GROUP]} must be refused by an error that says so, or give the reference's answer on every rank"

    def broken(signature: str, detail: str) -> Verdict:
        return Verdict(outcome=Outcome.NOT_IDENTICAL, claim=claim, detail=detail, signature=signature)

    batch = make_batch(case)
    for rank in range(RANKS):
        try:
            with subject.as_rank(rank, RANKS):
                loaded = subject.load_directory(case, checkpoint)
            if common_width(case) is None:
                return broken("ACCEPTED", f"rank {rank} was loaded without a word, and no reference has groups so narrow")
            output = subject.run(loaded, batch).output
        except LoadFailed as error:
            if refusal := next((each for each in declared(case, Entry.LAYER, backend) if each.matches(error.detail)), None):
                return Verdict(outcome=Outcome.UNSUPPORTED, claim=f"refused by design: {refusal.reason}", detail=error.detail)
            if _SAYS.search(error.detail):
                return Verdict(
                    outcome=Outcome.PASS, claim=f"{CLAIMS[Bad.CUT_GROUP]} is refused by an error that says so", detail=error.detail
                )
            return broken(f"UNNAMED:{error.detail.partition(':')[0]}", f"rank {rank}: the error says nothing of groups: {error.detail}")
        except RunFailed as error:
            return broken(f"RAISED:{error.detail.partition(':')[0]}", f"rank {rank} was loaded; its first forward raised {error.detail}")
        compared = compare(answer_of(case, checkpoint, batch, backend, rank), output)
        if compared.outcome is not Outcome.PASS:
            what = "NAN" if bool(torch.isnan(output).any()) else "WRONG"
            return broken(what, f"rank {rank}: {int(compared.bad.sum())} of {compared.bad.numel()} outputs are not the reference's")
    return Verdict(outcome=Outcome.PASS, claim=f"{CLAIMS[Bad.CUT_GROUP]} gives the answer of every rank's part")
