"""How a command ends: the exit codes, and the error that a user caused."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command; 125 is what ``git bisect run`` skips."""

    AS_THE_LEDGER_SAYS = 0
    NEWS = 1  # something failed that the ledger does not know, or stopped failing
    MISUSE = 2  # an argument, a case, the ledger file, or vLLM missing or not recognised
    UNAVAILABLE = 125  # this machine cannot run that backend
    INTERRUPTED = 130  # Ctrl-C, as a shell counts it


class Misuse(Exception):
    """Caused by the user. The message is one sentence that says what to do; it is shown without a traceback."""

    exit = Exit.MISUSE


class Unavailable(Misuse):
    """Nothing is wrong with the command, but this machine lacks what the backend needs."""

    exit = Exit.UNAVAILABLE


def not_installed(module: str) -> Misuse:
    """A Python module that the harness itself needs is missing."""
    return Misuse(f"the Python module '{module}' is not installed in this environment; `pip install -e .` installs what moediff needs")
