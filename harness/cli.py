"""``moediff``: how a command ends, whatever ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from harness.exits import Exit, Misuse, not_installed

_OURS = ("harness", "cases", "references", "reports")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns one of harness.exits.Exit, or 3 when pytest itself broke."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `moediff list | head` is no error
    try:
        return _run(argv)
    except Misuse as error:
        return _end(error.exit, str(error))
    except KeyboardInterrupt:
        return _end(Exit.INTERRUPTED, "interrupted")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", *_OURS):
            raise
        return _end(Exit.MISUSE, str(not_installed(missing)))


def _run(argv: Sequence[str] | None) -> int:
    from cases.case import InvalidCase
    from harness.command_line import parser  # only now: what it imports may not be installed
    from harness.ledger import LedgerError
    from reports.records import RecordsUnwritable

    try:
        arguments = parser().parse_args(argv)
        return int(arguments.handler(arguments))
    except (InvalidCase, LedgerError, RecordsUnwritable) as error:
        raise Misuse(str(error)) from None


def _end(code: int, sentence: str) -> int:
    sys.stderr.write(f"moediff: {sentence}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
