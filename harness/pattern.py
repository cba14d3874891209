"""Where the bad elements are, in one sentence."""

from __future__ import annotations

import torch


def pattern(bad: torch.Tensor, live: torch.Tensor, topk_ids: torch.Tensor) -> str:
    """The simplest description of ``bad`` [M, H]; "" when nothing is bad.

    live [M, H]: where something other than zero was expected or found; an all-zero row cannot tell. topk_ids [M, k]: who went where.
    """
    if not bool(bad.any()):
        return ""
    live = live | bad
    if bool((bad | ~live).all()):
        return "every element that is not zero is bad" if not bool(live.all()) else "every element is bad"
    rows, channels = bad.any(1), bad.any(0)
    parts = [_tokens(rows, live.any(1), topk_ids), _channels(channels, live.any(0))]
    return "; ".join(part for part in parts if part)


def _tokens(bad: torch.Tensor, live: torch.Tensor, topk_ids: torch.Tensor) -> str:
    tokens = live.nonzero().flatten().tolist()
    wrong = [token for token in tokens if bad[token]]
    if len(tokens) == 1:
        return ""
    if len(wrong) == len(tokens):
        return "every token is bad"
    went = {token: set(topk_ids[token].tolist()) for token in tokens}
    used = sorted(set().union(*went.values()))
    exact = [e for e in used if all((e in went[token]) == bool(bad[token]) for token in tokens)]
    if exact:
        return f"every bad token is routed to expert {exact[0]}, and every token of expert {exact[0]} is bad"
    spared = [e for e in used if all((e in went[token]) != bool(bad[token]) for token in tokens)]
    if spared:
        return f"every token is bad except those of expert {spared[0]}"
    guilty = [e for e in used if all(bad[token] for token in tokens if e in went[token])]
    if guilty and all(went[token] & set(guilty) for token in wrong):
        return f"every bad token is routed to one of experts {_list(guilty)}, and every token of theirs is bad"
    tokens_of = {e: sum(e in went[token] for token in tokens) for e in used}
    common = sorted(e for e in set.intersection(*(went[token] for token in wrong)) if tokens_of[e] < len(tokens))
    if common and len(wrong) > 1:
        return f"every bad token is routed to expert {common[0]} ({len(wrong)} of its {tokens_of[common[0]]} tokens)"
    return _runs("token", wrong, tokens) or f"{len(wrong)} of {len(tokens)} tokens are bad"


def _channels(bad: torch.Tensor, live: torch.Tensor) -> str:
    channels = live.nonzero().flatten().tolist()
    wrong = [channel for channel in channels if bad[channel]]
    if len(wrong) == len(channels):
        return ""
    odd = {channel % 2 for channel in wrong}
    if len(odd) == 1 and len(wrong) > 2 and all(bool(bad[channel]) for channel in channels if channel % 2 in odd):
        return f"every second channel, from channel {wrong[0]}"
    return _runs("channel", wrong, channels) or f"{len(wrong)} of {len(channels)} channels"


def _runs(noun: str, wrong: list[int], among: list[int]) -> str:
    """ "only channel 5", "only channels ≥ 112", "only channels 32 to 63", "every token except token 3"; "" for anything else."""
    if len(wrong) == 1:
        return f"only {noun} {wrong[0]}"
    between = [i for i in among if wrong[0] <= i <= wrong[-1]]
    if between == wrong:
        if wrong[-1] == among[-1]:
            return f"only {noun}s ≥ {wrong[0]}"
        return f"only {noun}s {wrong[0]} to {wrong[-1]}"
    right = [i for i in among if i not in set(wrong)]
    return f"every {noun} except {noun} {right[0]}" if len(right) == 1 else ""


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
