"""How a command is parsed, and how it ends, whatever ends it: ``moediff``, and the modules that are commands of their own."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from harness.exits import Exit, Misuse, not_installed
from harness.subject import SubjectUnavailable

_OURS = ("harness", "cases", "references", "reports")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of printing the usage."""

    _mixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Arguments of a command may stand before, between and after its options."""
        if self._mixed or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._mixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixed = False

    def error(self, message: str) -> NoReturn:
        """Raises Misuse."""
        raise Misuse(f"{message}; see `{self.prog} --help`")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises Misuse for what the system says while ``path``, which the user named, is written."""
    try:
        yield
    except OSError as error:
        raise Misuse(f"{path} cannot be written ({error.strerror}); name another file") from None


def ended(name: str, run: Callable[[], int]) -> int:
    """What ``run`` returns; where the user, the machine or Ctrl-C ended it, one sentence after ``name`` and one of harness.exits.Exit."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `moediff list | head` is no error
    try:
        return _run(run)
    except (Misuse, SubjectUnavailable) as error:
        return _end(name, getattr(error, "exit", Exit.MISUSE), str(error))
    except KeyboardInterrupt:
        return _end(name, Exit.INTERRUPTED, "interrupted")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", *_OURS):
            raise
        return _end(name, Exit.MISUSE, str(not_installed(missing)))


def _run(run: Callable[[], int]) -> int:
    from cases.axes import InvalidCase  # only now: what these import may not be installed
    from harness.backends import UnknownBackend
    from harness.ledger import LedgerError
    from reports.records import RecordsUnreadable, RecordsUnwritable

    try:
        return run()
    except (InvalidCase, LedgerError, RecordsUnreadable, RecordsUnwritable, UnknownBackend) as error:
        raise Misuse(str(error)) from None


def _end(name: str, code: int, sentence: str) -> int:
    sys.stderr.write(f"{name}: {sentence}\n")
    return code
