"""The command line of ``moediff``: parsing only; what a command does is in its own module, states of vLLM in harness/bisect/commands.py."""

from __future__ import annotations

import argparse
import os

from cases.case import Entry, Level
from harness.architectures import ARCHITECTURES, VARIABLE
from harness.backends import Backend
from harness.bisect.commands import add_subcommands
from harness.commands import bench, doctor, lanes, listing, matrix, run, show
from harness.program import Parser
from harness.suite.options import ARCHITECTURE_HELP, OUT, RESUME_HELP


def parser() -> Parser:
    """The whole command line."""
    whole = Parser(prog="moediff", description="Differential correctness harness for the MoE quantization paths of vLLM.")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser("run", help="run pairs and compare with the reference", description=run.__doc__)
    _choose_pairs(command)
    command.add_argument("-k", dest="expression", default="", metavar="EXPRESSION", help="only ids that match, as pytest's -k")
    command.add_argument(
        "-n",
        dest="workers",
        default="auto",
        metavar="N",
        help="worker processes; 0: none, for a debugger; default: what this machine takes",
    )
    command.add_argument("--architecture", default=os.environ.get(VARIABLE), metavar="NAME", help=ARCHITECTURE_HELP)
    command.add_argument("--subject", default="vllm", help="vllm; or fake[:FAULT], the harness without vLLM")
    command.add_argument("--records", metavar="DIR", help=f"where records are written; default: {OUT}")
    command.add_argument("--resume", metavar="RUN", help=RESUME_HELP)
    command.set_defaults(handler=run.main)

    command = commands.add_parser("list", help="print the ids of a level", description=listing.__doc__)
    command.add_argument("words", nargs="*", metavar="WORD", help="only ids that contain every word")
    command.add_argument("--level", default=Level.SMOKE.value, help=_of(Level))
    command.add_argument("--entry", help=_of(Entry))
    command.add_argument("--count", action="store_true", help="only how many")
    command.add_argument("--relations", action="store_true", help="the exact relations (relation:case[entry]) instead of the pairs")
    command.add_argument(
        "--checks",
        action="store_true",
        help="the checks of loading, and on a GPU's lane of the device (check:case[entry]), instead of the pairs",
    )
    command.add_argument(
        "--backend", help="only what this lane is asked; default: all pairs, or relations and checks of this machine's lane"
    )
    command.set_defaults(handler=listing.main)

    command = commands.add_parser("show", help="all there is to know of one case", description=show.__doc__)
    command.add_argument("case", metavar="CASE", help="a case's id, or CASE[ENTRY] as `moediff list` prints it")
    command.add_argument("--backend", help=f"{_of(Backend)}; default: the one this machine can run")
    command.add_argument(
        "--architecture", default=os.environ.get(VARIABLE), metavar="NAME", help=f"on this GPU: {', '.join(ARCHITECTURES)}"
    )
    command.set_defaults(handler=show.main)

    command = commands.add_parser("doctor", help="what is installed, which backends can run here", description=doctor.__doc__)
    command.set_defaults(handler=doctor.main)

    command = commands.add_parser("lanes", help="print the nightly matrix as JSON", description=lanes.__doc__)
    command.add_argument("--level", default=Level.NIGHTLY.value, help=f"{_of(Level)}; default: nightly")
    command.add_argument(
        "--backend", action="append", default=[], help=f"{_of(Backend)}; may be repeated; default: all that this harness can drive"
    )
    command.add_argument("--architecture", action="append", default=[], metavar="NAME", help="only this machine's lanes; may be repeated")
    command.set_defaults(handler=lanes.main)

    command = commands.add_parser("matrix", help="format × origin × backend: ran, refused, failed", description=matrix.__doc__)
    command.add_argument("runs", nargs="*", metavar="RUN", help="directories of runs to tell of; default: load, without a GPU")
    command.add_argument(
        "--architecture", action="append", metavar="NAME", help=f"{', '.join(ARCHITECTURES)}, or all; may be repeated; default: sm90"
    )
    command.add_argument("--backend", action="append", default=[], help=f"{_of(Backend)}; may be repeated; default: all")
    command.add_argument("--records", default=str(OUT), metavar="DIR", help=f"where records are written; default: {OUT}")
    command.set_defaults(handler=matrix.main)

    command = commands.add_parser("bench", help="measure the harness itself", description=bench.__doc__)
    command.add_argument(
        "what", choices=list(bench.BENCHES), help="; ".join(f"{name}: {what}" for name, (_, what) in bench.BENCHES.items())
    )
    command.add_argument("--backend", help=f"{_of(Backend)}; default: the one this machine can run")
    command.set_defaults(handler=bench.main)

    add_subcommands(commands)
    return whole


def _choose_pairs(command: argparse.ArgumentParser) -> None:
    command.add_argument("cases", nargs="*", metavar="CASE", help="case ids; default: all of the level")
    command.add_argument("--backend", help=f"{_of(Backend)}; default: the one this machine can run")
    command.add_argument("--level", default=Level.SMOKE.value, help=f"{_of(Level)}; default: smoke")
    command.add_argument("--entry", help=f"only through this entry: {_of(Entry)}")


def _of(values: type[Level] | type[Entry] | type[Backend]) -> str:
    return ", ".join(values)
