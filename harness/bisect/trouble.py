"""What can be wrong with a state: each its own sentence, each with its exit code (docs of ``git bisect run``)."""

from __future__ import annotations

from enum import IntEnum

from harness.exits import Misuse


class Exit(IntEnum):
    """Exit codes of compare, bisect and probe: what ``git bisect run`` takes them for."""

    GOOD = 0  # compare: nothing differs; bisect: the culprit is named
    BAD = 1  # compare: something differs; bisect: the ends do not span a change
    CANNOT_TELL = 125  # compare: a state cannot be driven; bisect: several candidates are left, or an end cannot be judged
    MISUSE = 128  # stops a `git bisect run`, as every higher one does
    INTERRUPTED = 130


class StateError(Misuse):
    """The user named a state that does not exist or cannot be read."""

    exit: int = Exit.MISUSE  # type: ignore[assignment]


class Interrupted(StateError):
    """Ctrl-C."""

    exit = Exit.INTERRUPTED


class StateUnavailable(StateError):
    """The state exists but cannot be built or driven here: never good, never bad."""

    exit = Exit.CANNOT_TELL
