"""The last page: Markdown that can be pasted into an issue as it is. Rendered from plain data; nothing is run here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.bisect.differences import Difference, Symptom
from harness.bisect.hunt import Answer, RegressOn, word
from harness.bisect.observe import Observation
from harness.bisect.repository import Commit
from harness.bisect.search import Ambiguous, Found, Result, Status
from harness.bisect.states import StateRun
from harness.bisect.trees import Tree
from harness.verdict import Outcome

_CELL = 60  # characters of an error in a table; the whole text is below the table
_FILES = 12
_COMPILED = ("csrc/", "cmake/", "CMakeLists.txt", "setup.py", "rust/")


def cell(observation: Observation) -> str:
    """One state's column: outcome, margin (0: every element equals the reference), signature, error, and a control that failed."""
    verdict = observation.verdict
    words = [verdict.outcome.value]
    if verdict.margin is not None and math.isfinite(verdict.margin):
        words.append("equal" if verdict.margin == 0 else f"margin {verdict.margin:.3g}")
    if verdict.signature and verdict.outcome is not Outcome.UNAVAILABLE:
        words.append(verdict.signature if len(verdict.signature) <= _CELL else verdict.signature[: _CELL - 1] + "…")
    match verdict.spread.get("elements"):
        case [int(bad), int(every)] if bad and (worst := verdict.worst):
            words.append(f"{bad} of {every} elements")
            words.append(f"{worst['actual']:.9g} for {worst['expected']:.9g} at {worst['index']}")
    if observation.control == "changed":
        words.append("CONTROL CHANGED")
    return ", ".join(words).replace("|", "\\|")


def comparison(
    runs: Sequence[StateRun],
    differences: Mapping[str, Sequence[tuple[StateRun, StateRun, Difference]]],
    command: str,
    environment: Mapping[str, str],
) -> str:
    """The page of ``compare``: only what differs, first as a table, then in words."""
    names = [run.tree.state.name for run in runs]
    pairs = len(runs[0].observations)
    lines = [f"## {len(differences)} of {pairs} pairs differ between {', '.join(names)}", ""]
    if differences:
        lines += ["| pair | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        lines += ["| " + " | ".join([f"`{pair}`", *(cell(run.observations[pair]) for run in runs)]) + " |" for pair in differences]
        lines.append("")
    for pair, found in differences.items():
        lines.append(f"**`{pair}`**")
        for before, after, difference in found:
            what = f"{difference.stage} × {difference.symptom}"
            extra = f"; {_sizes(difference)}" if difference.symptom is Symptom.MEMORY else ""
            first = f": {difference.first}" if difference.first else ""
            lines.append(f"- {before.tree.state.name} → {after.tree.state.name}: {what}{extra}{first}")
        lines += [f"- {run.tree.state.name}: {said}" for run in runs if (said := told(run.observations[pair]))]
        lines.append("")
    controls = [observation.control for run in runs for observation in run.observations.values() if observation.control]
    if controls:
        held = "identical in every state" if set(controls) == {"identical"} else f"changed {controls.count('changed')} times"
        lines += [f"Control (every scale of an expert without tokens doubled; {len(controls)} runs): output {held}.", ""]
    untried = [each for each in runs[0].observations.values() if each.pair not in differences and not tried(each)]
    if untried and not runs[0].unavailable:
        lines += [f"{len(untried)} of the others could not be tried in any state, the first `{untried[0].pair}`: {told(untried[0])}", ""]
    lines += _states(runs)
    return "\n".join([*lines, *_environment(environment), *_again(command)])


def tried(observation: Observation) -> bool:
    """False for what says nothing, neither good nor bad."""
    return observation.verdict.outcome is not Outcome.UNAVAILABLE


def told(observation: Observation) -> str:
    """What a failing pair says, on one line: the exception, or the broken claim with its pattern and worst element."""
    verdict = observation.verdict
    if verdict.outcome in (Outcome.PASS, Outcome.UNSUPPORTED):
        return verdict.detail.splitlines()[0] if verdict.detail else ""
    if verdict.detail:
        return f"{verdict.outcome}: {verdict.detail.splitlines()[0]}"
    words = [f"{verdict.outcome}: {verdict.claim}", verdict.pattern]
    if verdict.worst:
        worst = verdict.worst
        words.append(f"worst at {worst['index']}: actual {worst['actual']:.9g}, allowed {worst['low']:.9g} to {worst['high']:.9g}")
    if verdict.fits:
        words.append(f"best fit {verdict.fits[0].fault} leaves {verdict.fits[0].residual:.2g} of the deviation")
    return "; ".join(word for word in words if word)


def _sizes(difference: Difference) -> str:
    return f"{difference.before.loaded_bytes} -> {difference.after.loaded_bytes} bytes of parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search's page is made of."""

    revisions: Sequence[str]
    result: Result
    answers: Mapping[str, Answer]  # in the order they were asked
    on: RegressOn
    turns: Sequence[tuple[str, str]]
    failing: Sequence[Observation]  # at the culprit, or at the bad end
    turned: Sequence[Difference]  # between the last good one and the culprit
    commits: Mapping[str, Commit]  # of the candidates; empty for releases
    touched: Mapping[str, Sequence[str]]  # candidate -> paths
    merged: str = ""  # the merge that brought the culprit in, or a sentence on why it was not entered
    trees: Sequence[Tree] = ()


def search(found: Searched, command: str, environment: Mapping[str, str]) -> str:
    """The page of ``bisect``: the answer, the culprit, what fails, every probe, environment, command."""
    result = found.result
    verb = "fixed" if found.on is RegressOn.FIXED else "bad"
    lines = [f"## {_title(found)}", ""]
    good, bad = (word(status, found.on) for status in (Status.GOOD, Status.BAD))
    lines += [
        f"- searched: {_short(found.revisions[0])} ({good}) to {_short(found.revisions[-1])} ({bad}), {len(found.revisions)} revisions, "
        f"{len(found.answers)} probes; looked for: {found.on}",
        f"- result: {_result(result, found.on)}",
    ]
    candidates = (result.culprit,) if isinstance(result, Found) else result.candidates if isinstance(result, Ambiguous) else ()
    for name in candidates:
        lines += _commit(name, found, heading=f"first {verb}" if isinstance(result, Found) else "candidate")
    if found.merged:
        lines.append(f"- merge: {found.merged}")
    if len(found.turns) > 1:
        places = ", ".join(f"{_short(a)} / {_short(b)}" for a, b in found.turns)
        lines.append(
            f"- the history turns more than once (reverts?): the probes disagree between {places}; the answer is one of these places"
        )
    lines.append("")
    if isinstance(result, Found) and found.turned:
        ends = (_short(result.last_good), _short(result.culprit))
        lines += ["| pair | {} | {} | stage × symptom | bits that differ |".format(*ends), "|---|---|---|---|---|"]
        for each in found.turned:
            cells = (f"`{each.pair}`", cell(each.before), cell(each.after), f"{each.stage} × {each.symptom}", each.first)
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    for observation in found.failing:
        lines += [f"**`{observation.pair}`**", f"- {told(observation)}" if told(observation) else f"- {observation.verdict.outcome}", ""]
    lines += ["| probe | answer | what was seen |", "|---|---|---|"]
    where = {name: number for number, name in enumerate(found.revisions)}
    for name, answer in sorted(found.answers.items(), key=lambda item: where.get(item[0], len(where))):
        lines.append(f"| {_short(name)} | {word(answer.status, found.on)} | {answer.why.replace('|', chr(92) + '|')} |")
    lines += ["", *_notes(found.trees)]
    return "\n".join([*lines, *_environment(environment), *_again(command)])


def _result(result: Result, on: RegressOn) -> str:
    if on is RegressOn.FIXED and isinstance(result, Found):
        return _shortened(f"the first revision that passes is {result.culprit}; the one before it, {result.last_good}, fails")
    return _shortened(result.sentence)


def _title(found: Searched) -> str:
    what = found.failing[0].signature if found.failing else "nothing"
    match found.result:
        case Found(culprit=culprit):
            subject = f" ({found.commits[culprit].subject})" if culprit in found.commits else ""
            if found.on is RegressOn.FIXED:
                return f"{what} until {_short(found.result.last_good)}, mended in {_short(culprit)}{subject}"
            return f"{what} since {_short(culprit)}{subject}"
        case Ambiguous(candidates=candidates):
            since = "mended in" if found.on is RegressOn.FIXED else "since"
            return f"{what} {since} one of {len(candidates)} revisions, {_short(candidates[0])} to {_short(candidates[-1])}"
        case _:
            return "the change was not found"


def _commit(name: str, found: Searched, heading: str) -> Iterable[str]:
    commit = found.commits.get(name)
    if commit is None:
        return [f"- {heading}: {name}"]
    lines = [f"- {heading}: {commit.sha} {commit.subject} ({commit.author}, {commit.date})"]
    if commit.reverts:
        lines.append(f"  - it reverts {commit.reverts[:12]}")
    touched = found.touched.get(name, ())
    if touched:
        rest = f" and {len(touched) - _FILES} more" if len(touched) > _FILES else ""
        lines.append(f"  - files: {', '.join(touched[:_FILES])}{rest}")
    if compiled := [path for path in touched if path.startswith(_COMPILED)]:
        lines.append(f"  - {len(compiled)} of them are compiled or steer the build, and ran as the installed release has them")
    return lines


def _states(runs: Sequence[StateRun]) -> list[str]:
    lines = ["| state | what | vllm |", "|---|---|---|"]
    for run in runs:
        sha = f" ({run.tree.sha[:12]})" if run.tree.sha else ""
        lines.append(f"| {run.tree.state.name} | {run.tree.state}{sha} | {run.tree.version} |")
    lines.append("")
    lines += [f"- {run.tree.state.name} cannot be driven: {run.unavailable}" for run in runs if run.unavailable]
    return [*lines, *_notes([run.tree for run in runs])]


def _notes(trees: Sequence[Tree]) -> list[str]:
    notes = list(dict.fromkeys(note for tree in trees for note in tree.notes))
    return [*(f"- {note}" for note in notes), *([""] if notes else [])]


def _environment(environment: Mapping[str, str]) -> list[str]:
    said = ", ".join(f"{name} {value}" for name, value in environment.items() if value)
    return [f"Environment: {said}. Compiled extensions are the installed vllm's.", ""]


def _again(command: str) -> list[str]:
    return ["Again:", "", f"    {command}", ""]


def _short(name: str) -> str:
    return name[:12] if len(name) == 40 else name


def _shortened(sentence: str) -> str:
    return " ".join(word[:12] + word[40:] if len(word) >= 40 and word[:40].isalnum() else word for word in sentence.split())
