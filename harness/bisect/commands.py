"""``moediff compare | bisect | probe | cache``: arguments, exit codes, and what is printed."""

from __future__ import annotations

import argparse
import hashlib
import math
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from cases.case import Entry, InvalidCase, Level
from harness import preflight
from harness.backends import has_entry
from harness.bisect import report
from harness.bisect.cache import GIB, Cache, default_root
from harness.bisect.differences import Difference, Symptom, changed_bits, compare, first_difference
from harness.bisect.hunt import Answer, Hunt, Log, RegressOn, judge, overall, word
from harness.bisect.installation import Installation
from harness.bisect.observe import kept_name
from harness.bisect.repository import Repository
from harness.bisect.revisions import into_merges, line
from harness.bisect.search import Ambiguous, Cause, Found, NotFound, Result, Status, turns
from harness.bisect.spec import Revision, State, parse
from harness.bisect.states import Plan, StateRun, run, run_one
from harness.bisect.trees import planted
from harness.bisect.trouble import Exit, Interrupted, StateError
from harness.commands.output import say
from harness.environment import environment
from harness.exits import Misuse
from harness.pairs import Pair, parse_entry, parse_level, select
from harness.suite.options import parse_backend

_CODES = {
    "compare": "0 nothing differs, 1 something differs, 125 cannot tell",
    "bisect": "0 the culprit is named, 1 the ends do not span a change, 125 cannot tell",
    "probe": "as `git bisect run` takes them: 0 good, 1 bad, 125 cannot tell",
    "cache": "0 done",
}
SEARCHES = "searches"  # folder in the cache: the log and the last page of each search
_MOST = 1e12  # GiB or days
Subparsers = Any  # argparse gives its type no public name


def add_subcommands(commands: Subparsers) -> None:
    """Add compare, bisect, probe and cache to a command line's subparsers."""
    command = _command(commands, "compare", "run the same pairs in several vLLMs and show what differs", compare_states)
    command.add_argument("words", nargs="*", metavar="REV|CASE", help="without --state: REV, compared with its first parent; then case ids")
    command.add_argument(
        "--state", action="append", default=[], metavar="NAME=STATE", help="a revision, release:X.Y.Z or dir:PATH, +PATCH…"
    )
    command.add_argument("--bits", action="store_true", help="also list what passes in both and changed bits")
    command.add_argument("--speed", action="store_true", help="also list what became slower or faster")
    command.add_argument("--controls", action="store_true", help="also double the scales of an expert without tokens: nothing may change")
    _choose(command)

    command = _command(commands, "bisect", "find the first revision or release that shows a failure", bisect)
    command.add_argument("cases", nargs="*", metavar="CASE", help="case ids; default: all of the level")
    command.add_argument("--good", required=True, metavar="REV", help="a revision, or release:X.Y.Z")
    command.add_argument("--bad", required=True, metavar="REV", help="a later one")
    command.add_argument("--releases", default="", metavar="A,B,C", help="the releases between, instead of asking the registry")
    command.add_argument(
        "--regress-on", default=RegressOn.SIGNATURE.value, choices=list(RegressOn), help="what counts as bad; default: signature"
    )
    command.add_argument("--resume", action="store_true", help="go on with this very search where it was interrupted")
    _choose(command)

    command = _command(commands, "probe", "judge one vLLM by its exit code, for `git bisect run`", probe)
    command.add_argument("cases", nargs="*", metavar="CASE", help="case ids; default: all of the level")
    command.add_argument("--state", default="", metavar="STATE", help="what to probe; default: the checkout as it lies")
    command.add_argument(
        "--regress-on", default=RegressOn.ANY.value, choices=[RegressOn.ANY.value, RegressOn.FIXED.value], help="default: any"
    )
    command.add_argument("--signature", default="", metavar="TEXT", help="only this failure is bad, as `moediff bisect` prints it")
    _choose(command)

    command = _command(commands, "cache", "list or remove the trees that compare, bisect and probe have built", manage_cache)
    command.add_argument("--limit", type=_amount, metavar="GIB", help="remove the least recently used until this many GiB are left")
    command.add_argument("--older-than", type=_amount, metavar="DAYS", help="remove what was not used for so long")
    command.add_argument("--clear", action="store_true", help="remove everything that is not in use")


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"'{text}' is no amount")
    return number


def _command(commands: Subparsers, name: str, what: str, handler: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=handler.__doc__, epilog=f"exit codes: {_CODES[name]}, 128 misuse"
    )

    def refuse(message: str) -> NoReturn:
        raise StateError(f"{message}; see `{command.prog} --help`")

    plain = command.parse_known_args

    def parse_all(arguments: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        command.parse_known_args = plain  # type: ignore[method-assign]
        try:
            found, unknown = plain(arguments, namespace)  # takes cases before and after options, by calling itself
        finally:
            command.parse_known_args = parse_all  # type: ignore[assignment, method-assign]
        if unknown:
            refuse(f"unrecognized arguments: {' '.join(unknown)}")
        found.typed = [name, *arguments]
        return found, unknown

    # git bisect would take argparse's own exit code 2 for a verdict
    command.error, command.parse_known_args = refuse, parse_all  # type: ignore[assignment, method-assign]
    command.set_defaults(handler=lambda arguments: _guarded(handler, arguments))
    return command


def _guarded(handler: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """No error of the user's or of ours may look like "bad"."""
    try:
        return int(handler(arguments))
    except StateError:
        raise
    except KeyboardInterrupt:
        goes_on = ": the same command with --resume goes on from here" if hasattr(arguments, "resume") else ""
        raise Interrupted(f"interrupted{goes_on}") from None
    except (Misuse, InvalidCase) as error:
        raise StateError(str(error)) from None
    except Exception:  # noqa: BLE001 - Python would end with 1, which says "bad"
        traceback.print_exc()
        return Exit.MISUSE


def _choose(command: argparse.ArgumentParser) -> None:
    command.add_argument("--repo", type=Path, metavar="PATH", help="a vLLM checkout; it is only read")
    command.add_argument("--backend", metavar="BACKEND", help="default: the one this machine can run")
    command.add_argument("--level", default=Level.SMOKE.value, help=f"{', '.join(Level)}; default: smoke")
    command.add_argument("--entry", help=f"only through this entry: {', '.join(Entry)}")
    command.add_argument("--script", type=Path, metavar="FILE", help="a Python program instead of cases; its exit code is the verdict")


def _plan(arguments: argparse.Namespace, cases: Sequence[str], *, controls: bool = False) -> Plan:
    backend = parse_backend(arguments.backend)
    if script := arguments.script:
        if cases or not script.is_file():
            raise StateError(f"--script takes the place of cases: leave {cases[0]} out" if cases else f"there is no file {script}")
        return Plan(pairs=(), backend=backend, script=script)
    preflight.check(backend, "vllm")
    entry = None if arguments.entry is None else parse_entry(arguments.entry)
    chosen = select(parse_level(arguments.level), cases, entry)
    pairs = tuple(pair for pair in chosen if has_entry(pair.entry, backend))
    if not pairs:
        raise StateError(f"backend '{backend}' has no entry '{chosen[0].entry}': leave --entry out, or name another backend")
    return Plan(pairs=pairs, backend=backend, controls=controls)


def _cache() -> Cache:
    return Cache(default_root())


def _again(arguments: argparse.Namespace, plan: Plan, meant: Mapping[str, str]) -> str:
    """The command as typed, with what ``meant`` says in place of words whose meaning moves: a branch, or this machine's backend."""
    again = ["moediff"]
    for typed in arguments.typed:
        option, equals, value = typed.partition("=") if typed.startswith("--") else ("", "", typed)
        again.append(f"{option}{equals}{meant.get(value, value)}")
    backend = [] if arguments.backend else ["--backend", plan.backend.value]
    return shlex.join([*(each for each in again if each != "--resume"), *backend])


def compare_states(arguments: argparse.Namespace) -> int:
    """Run the same pairs, bytes and seeds in several vLLMs, each in a process of its own, and show what differs."""
    states, cases, typed = _states_of(arguments)
    plan = _plan(arguments, cases, controls=arguments.controls)
    cache, installed = _cache(), Installation.find()
    with ExitStack() as held, tempfile.TemporaryDirectory(prefix="moediff-") as folder:
        trees = [held.enter_context(planted(state, cache, installed)) for state in states]
        runs = run(trees, plan, keep=Path(folder))
        differences = _differences(runs, Path(folder), bits=arguments.bits, speed=arguments.speed)
    meant = {text: tree.stated for text, tree in zip(typed, trees, strict=True)} if arguments.state else {typed[0]: trees[1].sha}
    say(report.comparison(runs, differences, _again(arguments, plan, meant), environment()))
    if any(each.unavailable for each in runs):
        return Exit.CANNOT_TELL
    if any(each.symptom is not Symptom.UNAVAILABLE for found in differences.values() for _, _, each in found):
        return Exit.BAD
    every = [observation for each in runs for observation in each.observations.values()]
    return Exit.GOOD if all(map(report.tried, every)) else Exit.CANNOT_TELL


def _states_of(arguments: argparse.Namespace) -> tuple[list[State], list[str], list[str]]:
    """The states, the case ids, and the words that named the states."""
    if arguments.state:
        states = [parse(text, arguments.repo) for text in arguments.state]
        if len(states) < 2:
            raise StateError("one state has nothing to be compared with: give --state twice or more")
        if len({state.name for state in states}) < len(states):
            raise StateError("two states have the same name: write --state NAME=STATE")
        return states, arguments.words, arguments.state
    if not arguments.words:
        raise StateError("name a revision to compare with its parent, or states with --state NAME=STATE")
    repository = Repository.at(arguments.repo or Path())
    after = repository.resolve(arguments.words[0])
    before = repository.parent(after)
    states = [
        State(name=name, base=Revision(repository=repository.path, revision=sha)) for name, sha in (("before", before), ("after", after))
    ]
    return states, arguments.words[1:], arguments.words[:1]


def _differences(
    runs: Sequence[StateRun], kept: Path, *, bits: bool, speed: bool
) -> dict[str, list[tuple[StateRun, StateRun, Difference]]]:
    """Per pair that differs, every state that differs from the first."""
    found: dict[str, list[tuple[StateRun, StateRun, Difference]]] = {}
    first = runs[0]
    for pair, before in first.observations.items():
        for number, other in enumerate(runs[1:], 1):
            difference = compare(before, other.observations[pair], bits=bits, speed=speed)
            if difference is not None:
                if difference.symptom is not Symptom.UNAVAILABLE:
                    name = kept_name(pair)
                    first_of = first_difference(difference, kept / "0" / name, kept / str(number) / name)
                    listed = f"{changed_bits(difference)} changed; " if difference.symptom is Symptom.BITS else ""
                    difference = replace(difference, first=f"{listed}{first_of}")
                found.setdefault(pair, []).append((first, other, difference))
    return found


def bisect(arguments: argparse.Namespace) -> int:
    """Search a first-parent line of a checkout, or the releases between two, for the first that shows a failure.

    Exit codes: 0 the culprit is named, 1 the ends do not span a change, 125 several candidates are left or an end cannot be judged,
    128 misuse.
    """
    plan = _plan(arguments, arguments.cases)
    chosen = tuple(version for version in arguments.releases.split(",") if version)
    through = line(arguments.good, arguments.bad, arguments.repo or Path(), chosen)
    cache, installed, on = _cache(), Installation.find(), RegressOn(arguments.regress_on)
    asked = {
        "good": through.names[0],
        "bad": through.names[-1],
        "what": str(plan.script.resolve()) if plan.script else " ".join(pair.id for pair in plan.pairs),
        "backend": plan.backend.value,
        "regress-on": on.value,
        "vllm": installed.version,
    }
    log = cache.root / SEARCHES / hashlib.sha256(repr(asked).encode()).hexdigest()[:12]

    def run_at(revision: str, pairs: Sequence[Pair]) -> StateRun:
        with planted(through.state(revision), cache, installed) as tree:
            return run_one(tree, replace(plan, pairs=tuple(pairs)))

    def key_of(revision: str) -> str:
        with planted(through.state(revision), cache, installed) as tree:
            return tree.key

    hunt = Hunt(
        pairs=plan.pairs,
        on=on,
        run=run_at,
        key_of=key_of,
        log=Log.start(log.with_suffix(".json"), asked, resume=arguments.resume),
        tell=lambda revision, answer: _progress(revision, answer, on),
    )
    result, merged = into_merges(hunt, through, hunt.search(through.names))
    page = report.search(
        report.Searched(
            revisions=through.names,
            result=result,
            answers=hunt.log.answers,
            on=on,
            turns=turns(through.names, hunt.log.statuses),
            failing=list(hunt.log.observed(_shown(result, on, through.names)).values()),
            turned=_turned(hunt.log, result),
            commits=through.commits(result),
            touched={name: through.repository.touched(name) for name in through.commits(result)} if through.repository else {},
            merged=merged,
            trees=hunt.trees,
        ),
        _again(arguments, plan, {arguments.good: through.names[0], arguments.bad: through.names[-1]} if through.repository else {}),
        environment(),
    )
    log.parent.mkdir(parents=True, exist_ok=True)  # `moediff cache --clear` may have run meanwhile
    log.with_suffix(".md").write_text(page)
    say(page)
    sys.stderr.write(f"this page: {log.with_suffix('.md')}\n")
    if isinstance(result, Found):
        return Exit.GOOD
    return (
        Exit.CANNOT_TELL if isinstance(result, Ambiguous) or result.cause in (Cause.GOOD_END_UNKNOWN, Cause.BAD_END_UNKNOWN) else Exit.BAD
    )


def _shown(result: Result, on: RegressOn, names: Sequence[str]) -> str:
    """The revision whose failure the page shows: the culprit's, or what a repair mended."""
    if on is RegressOn.FIXED:
        return names[0] if isinstance(result, NotFound) else result.last_good
    return result.culprit if isinstance(result, Found) else names[-1]


def _turned(log: Log, result: Result) -> list[Difference]:
    """How the pairs searched with differ between the last good revision and the culprit, when both were run."""
    if not isinstance(result, Found):
        return []
    before, after = log.observed(result.last_good), log.observed(result.culprit)
    found = [compare(before[pair], after[pair]) for pair in after if pair in before]
    return [replace(each, first=changed_bits(each)) for each in found if each is not None]


def _progress(revision: str, answer: Answer, on: RegressOn) -> None:
    sys.stderr.write(f"{revision[:12]}  {word(answer.status, on):8}{answer.why}\n")
    sys.stderr.flush()


def probe(arguments: argparse.Namespace) -> int:
    """Judge one vLLM: `git bisect run moediff probe CASE…` in a vLLM checkout, or --state for any other."""
    plan = _plan(arguments, arguments.cases)
    state = parse(arguments.state or f"dir:{(arguments.repo or Path()).resolve()}", arguments.repo)
    on = RegressOn.SIGNATURE if arguments.signature else RegressOn(arguments.regress_on)
    with planted(state, _cache(), Installation.find()) as tree:
        observed = run_one(tree, plan)
    judged = {pair: judge(each, on, arguments.signature) for pair, each in observed.observations.items()}
    status = overall(list(judged.values()), on)
    say(_probed(status, observed, judged))
    return {Status.GOOD: Exit.GOOD, Status.BAD: Exit.BAD, Status.UNKNOWN: Exit.CANNOT_TELL}[status]


def _probed(status: Status, run: StateRun, judged: Mapping[str, Status]) -> str:
    lines = [f"{status}: {run.tree.state} ({run.subject or run.tree.version})", *run.tree.notes]
    if run.unavailable:
        return "\n".join([*lines, run.unavailable])
    decisive = [pair for pair, each in judged.items() if each is status] if status is not Status.GOOD else []
    return "\n".join([*lines, *(f"{pair}: {report.told(run.observations[pair]) or run.observations[pair].signature}" for pair in decisive)])


def manage_cache(arguments: argparse.Namespace) -> int:
    """List the trees, or remove some; what a running command uses stays."""
    cache = _cache()
    if not cache.root.is_dir():
        say(f"{cache.root}: empty")
        return Exit.GOOD
    if arguments.clear or arguments.limit is not None or arguments.older_than is not None:
        limit = 0 if arguments.clear else cache.limit if arguments.limit is None else int(arguments.limit * GIB)
        for entry in cache.evict(limit, older_than=(arguments.older_than or 0) * 86400):
            say(f"removed {entry.key}  {entry.size / GIB:.2f} GiB  {entry.what}")
        if arguments.clear:
            shutil.rmtree(cache.root / SEARCHES, ignore_errors=True)
    entries = cache.entries()
    for entry in entries:
        say(f"{entry.key}  {entry.size / GIB:.2f} GiB  {entry.what}")
    say(f"{cache.root}: {len(entries)} trees, {sum(entry.size for entry in entries) / GIB:.2f} of {cache.limit / GIB:.0f} GiB")
    return Exit.GOOD
