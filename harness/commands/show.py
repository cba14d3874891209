"""Everything about one case: its fields, the checkpoint on disk, what vLLM is made to run, what the reference rounds."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cases.case import Data, Entry, Level, MoECase, Routing, entry_takes
from cases.roles import empty_expert, zero_expert
from harness import architectures, ledger
from harness.backends import SPECS, Backend, declared_refusal, experts_expected, has_entry
from harness.commands.output import draw, say
from harness.environment import version
from harness.exits import Exit, Misuse
from harness.lanes import driven
from harness.pairs import Pair, parse_pair, relate, repeat
from harness.suite.options import parse_backend, runs
from references.vocabulary import ActQuant, Recipe

if TYPE_CHECKING:
    from harness.ledger import Ledger

_E, _H, _I = 3, 768, 1280  # of the small layer of on_disk
_PARTS = (1, 2, 4, 8, 16, 32, 64, 128)  # that groups, blocks and words make of a size


def main(arguments: Namespace) -> int:
    """Raises Misuse."""
    (case, only), known = parse_pair(arguments.case), ledger.load(ledger.LEDGER)
    name = architectures.parse(arguments.architecture).name if arguments.architecture else ""
    backend = Backend.INTERPRETER if name and not arguments.backend else parse_backend(arguments.backend)
    if only is not None and not has_entry(only, backend):
        raise Misuse(f"backend '{backend}' has no entry '{only}'; leave [{only}] out, or name another with --backend")
    say(case.id)
    draw(_fields(case))
    tensors, config = on_disk(case)
    draw(_tensors(case, tensors))
    say(f"quantization_config: {config}\n")
    with architectures.answering_as(name):
        for entry in Entry:
            if only in (None, entry) and entry_takes(case, entry) and has_entry(entry, backend):
                draw(_expectation(case, entry, backend, known, name))
                say(_again(Pair(case, entry), backend, name))
    return Exit.AS_THE_LEDGER_SAYS


def _again(pair: Pair, backend: Backend, architecture: str) -> str:
    """The command that runs the pair; why there is none, where no run asks for it."""
    if architecture and SPECS[backend].needs_gpu and pair.entry is not Entry.LAYER:
        return f"A CPU that answers as {architecture} loads layers for {backend}, and runs nothing: no command repeats this pair.\n"
    if not architecture and not any(map(driven, SPECS[backend].architectures)):
        return f"This harness cannot drive the GPUs of {backend} yet: no command repeats this pair.\n"
    if not architecture and not runs(pair, backend):
        on = ", ".join(SPECS[backend].architectures)
        return f"No command repeats this pair: with --architecture NAME it is loaded as for one of {on}.\n"
    return f"again: {repeat(pair, backend)}{f' --architecture {architecture}' if architecture else ''}\n"


def _fields(case: MoECase) -> Table:
    table = _table("case", "field", "value")
    for each in fields(case):
        table.add_row(each.name, _word(getattr(case, each.name)))
    for what, expert in (("expert without weights", zero_expert(case)), ("expert without tokens", empty_expert(case))):
        table.add_row(what, "none" if expert is None else str(expert))
    return table


def on_disk(case: MoECase) -> tuple[dict[str, tuple[list[int], str]], dict[str, Any] | None]:
    """Shape and dtype of each tensor of the checkpoint, of expert 0 where each expert has its own, and the quantization config.

    Read off a small layer in whose shapes every part of E, H and I is another number: no layer is too large to be shown.
    """
    from cases.checkpoint import make_checkpoint  # imports torch, which `moediff list` does without

    small = replace(case, experts=_E, top_k=1, tokens=1, hidden=_H, intermediate=_I, data=Data.DENSE, routing=Routing.BALANCED)
    checkpoint = make_checkpoint(small)
    means = {_E: case.experts, 2 * _I: 2 * case.intermediate}
    for part in _PARTS:
        means |= {_H // part: -(-case.hidden // part), _I // part: -(-case.intermediate // part)}
    found = {
        name: ([means.get(size, size) for size in tensor.shape], str(tensor.dtype).removeprefix("torch."))
        for name, tensor in checkpoint.tensors.items()
        if name.startswith("0.") or not name[0].isdigit()
    }
    return found, checkpoint.quantization_config


def _tensors(case: MoECase, tensors: dict[str, tuple[list[int], str]]) -> Table:
    each = all(name.startswith("0.") for name in tensors)
    title = f"{len(tensors) * case.experts} tensors, expert 0 of {case.experts} alike" if each else f"{len(tensors)} tensors"
    table = _table(f"checkpoint: {title}", "tensor", "shape", "dtype")
    for name, (shape, dtype) in tensors.items():
        table.add_row(name, str(shape), dtype)
    return table


def _expectation(case: MoECase, entry: Entry, backend: Backend, known: Ledger, architecture: str) -> Table:
    from harness.recipes import recipe, written

    table = _table(f"through {entry} on {backend}{f', as {architecture}' if architecture else ''}", "what", "expected")
    issue = next((i for i in known.issues if i.covers(case.id, entry, backend, version("vllm") or "")), None)
    if issue is not None:
        table.add_row("known issue", f"{issue.id}: {issue.outcome} {issue.signature} ({issue.link})")
    if refusal := declared_refusal(case, entry, backend):
        table.add_row("outcome", f"refused by vLLM{', when it runs' if refusal.at_run else ''}: {refusal.reason}")
        table.add_row("vLLM says" if refusal.reasoned else "without a reason: vLLM ends with", Text(refusal.says))
        return table
    table.add_row("class that runs", " or ".join(sorted(experts_expected(case, entry, backend))))
    if not written(case, entry, backend):
        table.add_row("outcome", "loaded and nothing more: no reference is written for what runs there")
        return table
    exact = case.data is Data.LATTICE
    inside = "inside the interval the recipe allows (references/bounds.py)"
    table.add_row("outcome", "equal to the reference, bit for bit" if exact else inside)
    if relations := relate(Level.SMOKE, (case.id,), entry, backend):
        table.add_row("exact relations", ", ".join(each.relation for each in relations))
    for name, value in _roundings(recipe(case, entry, backend)):
        table.add_row(name, value)
    return table


def _roundings(recipe: Recipe) -> list[tuple[str, str]]:
    return [(each.name, _word(getattr(recipe, each.name))) for each in fields(recipe)]


def _word(value: object) -> str:
    if isinstance(value, ActQuant):
        return ", ".join(f"{each.name} {_word(getattr(value, each.name))}" for each in fields(value))
    if isinstance(value, tuple):
        return ", ".join(map(_word, value))
    return str(value.value) if isinstance(value, Enum) else str(value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
