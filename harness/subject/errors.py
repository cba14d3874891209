"""Turning what vLLM raised into LoadFailed and RunFailed, verbatim."""

from __future__ import annotations

import traceback
from pathlib import Path

_REFUSALS = (ValueError, NotImplementedError, RuntimeError)  # exactly these: a pydantic ValidationError or a KeyError is an accident


def verbatim(error: BaseException) -> str:
    """``Type: text`` of an exception as raised; a Triton interpreter error shows the error it wraps too."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        return f"{text} (from {type(error.__cause__).__name__}: {error.__cause__})"
    missing = _missing_operator(error)
    if missing is not None:
        first = str(error).split(". This could be because", 1)[0]
        return f"compiled operator {missing} has no CPU implementation in the interpreter lane: {type(error).__name__}: {first}"
    return text


def _missing_operator(error: BaseException) -> str | None:
    if not isinstance(error, NotImplementedError):
        return None
    from harness.subject.interpreter.compiled_ops import missing_operator

    return missing_operator(error)


def is_refusal(error: BaseException, package: Path) -> bool:
    """Whether vLLM (installed in ``package``) declined with a reason, while it chose how to run the layer.

    That is: a ValueError, NotImplementedError or RuntimeError itself, with a text, from a ``raise`` statement in vLLM's own code:
    what torch raises below a vLLM frame is no refusal, nor is an assertion.
    """
    if type(error) not in _REFUSALS or not str(error) or _missing_operator(error) is not None:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and package in Path(frames[-1].filename).parents and (frames[-1].line or "").lstrip().startswith("raise ")
