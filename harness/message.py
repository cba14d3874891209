"""A verdict in words, for someone who has never seen the harness: claim, place, pattern, numbers, fitted cause, how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from harness.faults import Fault
from harness.verdict import FaultFit, Verdict

_ENVIRONMENT = ("vllm", "torch", "triton", "gpus", "cpu", "commit")
_WIDTH = 9
_GAINS = 3
_HARDLY = 0.9


def message(verdict: Verdict, *, pair: str, backend: str, environment: Mapping[str, str], again: str) -> str:
    """Lines of a label and a sentence each. pair: ``case[entry]``; again: the command that repeats it."""
    lines = [f"{verdict.outcome}  {pair}  backend={backend}", _line("claim", verdict.claim)]
    if verdict.worst:
        lines.append(_line("worst", _worst(verdict.worst)))
    if verdict.spread:
        lines.append(_line("spread", _spread(verdict.spread)))
    if verdict.pattern:
        lines.append(_line("pattern", verdict.pattern))
    lines += [_line("gain", text) for text in _gains(verdict.gains)]
    if verdict.fits:
        lines.append(_line("fits", _fits(verdict.fits)))
    if verdict.signature:
        lines.append(_line("named", verdict.signature))
    lines += [_line("detail", text) for text in verdict.detail.strip().splitlines()]
    told = " · ".join(f"{name} {environment[name]}" for name in _ENVIRONMENT if environment.get(name))
    told = told if environment.get("vllm") else " · ".join(filter(None, (environment.get("subject"), told)))
    lines += [_line("env", told)] if told else []
    return "\n".join([*lines, _line("again", again)])


def _line(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}}{text}"


def _worst(worst: Mapping[str, object]) -> str:
    token, channel = cast(Sequence[int], worst["index"])
    number = {name: cast(float, worst[name]) for name in ("actual", "expected", "low", "high")}
    experts = ", ".join(map(str, cast(Sequence[int], worst["experts"])))
    return (
        f"token {token}, channel {channel}: actual {number['actual']:.9g} ({worst['bits']}), expected {number['expected']:.9g}, "
        f"allowed {number['low']:.9g} to {number['high']:.9g} before the last rounding; routed to {experts}"
    )


def _spread(spread: Mapping[str, object]) -> str:
    parts = []
    for name, value in spread.items():
        match value:
            case [int(some), int(every)] if name in ("elements", "tokens", "channels"):
                parts.append(f"{some} of {every} {name}")
            case list():
                parts.append(f"{name}: {', '.join(map(str, value))}")
            case _:
                parts.append(f"{value} {name}")
    return ", ".join(parts)


def _gains(gains: Mapping[str, object]) -> list[str]:
    flagged = cast(Sequence[Mapping[str, object]], gains.get("flagged", ()))
    words = {"expert": "expert {}", "channel": "expert {}, channel {}", "token": "token {}"}
    out = []
    for each in flagged[:_GAINS]:
        where = words[str(each["group"])].format(*cast(Sequence[int], each["index"]))
        out.append(f"{where}: {each['alpha']:.6g} ± {each['se']:.2g}, honest within {each['smallest']:.2g} of 1")
    more = cast(int, gains.get("flagged groups", 0)) - _GAINS
    return [*out, f"and {more} more groups of elements"] if more > 0 else out


def _fits(fits: Sequence[FaultFit]) -> str:
    best, *others = fits
    if best.residual > _HARDLY:
        return f"none of the named faults; the nearest, {best.fault}, leaves {best.residual:.2g} of the deviation"
    on = f" on expert{'s' if len(best.experts) > 1 else ''} {', '.join(map(str, best.experts))}" if best.experts else ""
    said = ", and ".join(Fault[name].value for name in best.fault.split("+"))
    text = f"{best.fault}{on}: {said} (leaves {best.residual:.2g} of the deviation)"
    return text + "".join(f"; next {each.fault} ({each.residual:.2g})" for each in others[:1])
