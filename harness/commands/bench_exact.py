"""``moediff bench exact``: the founding fault row by row, and every form of a scale tensor, on the vLLM that is installed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from harness.backends import SPECS
from harness.commands.output import draw
from harness.exits import Exit, Misuse
from harness.gpus import visible_gpus, worker_environment
from harness.preflight import check
from harness.relations import EXACT

if TYPE_CHECKING:
    from harness.backends import Backend


def main(backend: Backend) -> int:
    """Raises Misuse for a lane without exact relations, SubjectError where vLLM raises."""
    if backend not in EXACT:
        raise Misuse(f"exact relations are asked on {' and '.join(EXACT)} only, not on '{backend}'")
    check(backend, "vllm")
    os.environ.update(worker_environment(backend, "main", visible_gpus()))
    if not SPECS[backend].needs_gpu:
        from harness.subject.interpreter.activate import prepare_environment

        prepare_environment()
    from harness import forms, founding
    from harness.suite.subjects import VLLM, open_subject

    subject = open_subject(VLLM, backend)
    for text in (*founding.CASES, *founding.OPPOSITE):
        draw(founding.render(list(founding.rows(text, subject, backend))))
    draw(forms.render([form for case in forms.cases(backend) for form in forms.forms(case, subject, backend)]))
    return Exit.AS_THE_LEDGER_SAYS
