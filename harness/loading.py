"""What is asked of loading: which question of which pairs. No torch: tests are collected from here."""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from cases.bad_checkpoints import Bad, bad_checkpoints
from cases.case import Entry, Level, MoECase, Origin
from cases.generate import pairs
from cases.memory import MANY, memory_cases
from cases.packed import weight_only_words
from cases.shards import leading, shard_cases
from harness.backends import Backend
from harness.pairs import Pair
from harness.suite.subjects import VLLM
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from harness.suite.options import Options


class Question(StrEnum):
    """Closed. Values are what test ids, records and the ledger say."""

    LOADED = "loaded"  # every oracle of harness/load_oracles.py that layer depth can answer
    DIRECTORY = "directory"  # vLLM's own loader, reading a directory, leaves the same parameters
    STACKED = "stacked"  # and so it does where the experts of a projection are one tensor
    MEMORY = "memory"  # conversion and quantization allocate what they need
    SHARDED = "sharded"  # divided among ranks, each holds its part, and their outputs add up


FURTHER_ON = (Backend.INTERPRETER, Backend.TRITON)  # lanes on which ranks and wrong checkpoints are asked: loaders are the same on all


class Asked(NamedTuple):
    """A question asked of a pair."""

    question: Question | Bad
    pair: Pair

    @property
    def id(self) -> str:
        """What pytest shows and ``-k`` matches."""
        return f"{self.question}:{self.pair.id}"


def questions(level: Level, backend: Backend) -> tuple[Asked, ...]:
    """Every question of a level, in the generator's order. Smoke reads one directory of each scheme with a gate and one without."""
    every = about([Pair(*pair) for pair in pairs(level)])
    if backend not in FURTHER_ON:  # where kernels pad small experts to whole tiles, memory says something of large ones only
        every = tuple(asked for asked in every if asked.question is not Question.MEMORY)
    further = (*sharded(level), *bad()) if backend in FURTHER_ON else ()
    if level is not Level.SMOKE:
        return (*every, *memory(), *further)
    first: dict[Hashable, Asked] = {}
    for asked in every:
        first.setdefault((asked.question, *_kind(asked.pair.case)), asked)
    one = (Question.DIRECTORY, Question.STACKED)
    return (*(asked for asked in every if asked.question not in one or asked in first.values()), *memory(), *further)


def memory() -> tuple[Asked, ...]:
    """Every way of quantizing, with so many experts that no temporary of all of them can hide in one expert's scratch."""
    return tuple(Asked(Question.MEMORY, Pair(case, Entry.LAYER)) for case in memory_cases())


def sharded(level: Level) -> tuple[Asked, ...]:
    """Every way of quantizing, divided among ranks."""
    cases = (case for case in shard_cases() if level is not Level.SMOKE or leading(case))
    return tuple(Asked(Question.SHARDED, Pair(case, Entry.LAYER)) for case in cases)


def bad(cases: frozenset[MoECase] | None = None) -> tuple[Asked, ...]:
    """The wrong checkpoints of these cases, where they have any; of every case that has."""
    return tuple(Asked(each.bad, Pair(each.case, Entry.LAYER)) for each in bad_checkpoints() if cases is None or each.case in cases)


def _kind(case: MoECase) -> tuple[Hashable, ...]:
    return (case.weight, case.weight_scale, case.act_scale, case.checkpoint, case.origin, case.activation.gated)


def about(chosen: list[Pair]) -> tuple[Asked, ...]:
    """The questions asked of these pairs: those that enter by the layer."""
    layers = [pair for pair in chosen if pair.entry is Entry.LAYER]
    return tuple(Asked(question, pair) for pair in layers for question in Question if applies(question, pair.case))


def applies(question: Question, case: MoECase) -> bool:
    """Whether the question can be asked of a case.

    A model's configuration refuses fp32 hidden states of quantized models, and fp16 ones of ModelOpt's MXFP8, before any layer is built
    (config/vllm.py; get_supported_act_dtypes of modelopt.py). Stacked, vLLM reads
    weights and scales of three dimensions and no biases (fused_moe/routed_experts.py, load_weights); interleaved, they are stacked on disk
    already. gpt-oss's are stacked always, and loaded by its own model (models/gpt_oss.py). With few experts one full-size
    temporary is no more than one expert's scratch.
    """
    if case.checkpoint is CheckpointFormat.GPT_OSS:
        return question in (Question.LOADED, Question.DIRECTORY)
    if question is Question.LOADED:
        return True
    if question is Question.MEMORY:
        return case.experts >= MANY
    if question is Question.SHARDED:
        return case in shard_cases()
    if case.quantized and case.dtype is Format.FP32:
        return False
    if case.checkpoint is CheckpointFormat.MODELOPT and case.weight_scale is Layout.GROUP32 and case.dtype is Format.FP16:
        return False
    if question is Question.DIRECTORY:
        return True
    if weight_only_words(case):
        return False
    columns = case.weight_scale is Layout.CHANNEL and case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS
    three = case.origin is not Origin.PREQUANTIZED or columns or case.weight_scale is Layout.BLOCK128
    return three and not case.bias and case.activation.value != "swigluoai"


def chosen(options: Options) -> tuple[Asked, ...]:
    """What a run asks: of its level, or of the cases named. A fake subject loads nothing; without the GPU, a layer can be asked only what
    holds before its conversion ends. Raises Misuse."""
    if options.subject != VLLM or options.entry not in (None, Entry.LAYER):
        return ()
    if options.cases:
        named = list(options.pairs())
        asked = (*about(named), *(bad(frozenset(pair.case for pair in named)) if options.backend in FURTHER_ON else ()))
    else:
        asked = questions(options.level, options.backend)
    return tuple(each for each in asked if each.question is Question.LOADED) if options.loads_only else asked
