"""Gain statistics: a systematic factor on one expert, one output channel of one expert, or one token.

An interval is elementwise and worst-case; averaging sees less. With d = actual - expected and c_e the contribution of expert e
(router weight included, expected = sum_e c_e), fit d ~= sum_e (alpha_e - 1) c_e by least squares over rows normalised by their own
uncertainty, so that rows of small magnitude count as much as large ones.

Honest d is a rounding to the output dtype (anything within half an ulp h: variance h**2 / 3) plus a deviation inside the interval
(|.| <= r, arbitrary). Roundings are not always independent: a result of 8 bits times a router weight just below 1 is rounded back up in
every channel. Where all of the interval rounds to one number, d is taken from that number, and an honest one is 0. With the estimator
alpha - 1 = sum_j P_j d_j, P = (X' W X)^-1 X' W, this gives

    se   = max(sqrt(sum_j P_j**2 h_j**2 / 3), standard error from the residuals)
    bias = Answer.gain_bias + sum_j |P_j| r_j

and a group is flagged when |alpha - 1| > 6 se + bias. The bias is a bound, not an estimate: what it covers needs no statistics.

Where many quantized codes are in doubt that bound is wide, and an expert has a second one, from what is seen. A deviation comes from codes
that fell the other way, each moving a token's output along one column of w2. It changes the gain only by its part along the output itself;
the rest is scatter, which the residual e shows. A column that holds at most four fifths of the energy of a token's output has at most
twice as much along it as across it, so with Cauchy-Schwarz token by token (W the weights of the fit)

    bias = Answer.gain_bias + scalars + sum_mk |P_m c_mk| s_mk + 2 sum_m |W^-1/2 P_m| |W^1/2 e_m|

with |W^1/2 e_m|**2 less what output roundings add to it (se has them), and two things that do not scatter: scalars, the error of the fp32
factors all elements of a token share (router weight, activation scales), and s_mk, the doubt in the dynamic scale of a row of w2's
activations whose largest element was stored in 16 bits before. The smaller of the two is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from harness.preimage import half_gaps
from references.bounds import DIVISION, U32, router_weights
from references.formats import round_to
from references.moe import Answer

_ALONG_OVER_ACROSS = 2.0  # tan of the angle whose cosine squared is 4/5, inverted: sqrt(4/5 / (1/5))
SIGMAS = 6.0  # two-sided 2e-9 for a Gaussian, less for sums of bounded roundings; a run tests some 1e6 groups


class Group(StrEnum):
    """What shares one gain. Values are the words of a message."""

    EXPERT = "expert"
    CHANNEL = "channel"  # one output channel of one expert
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """alpha of actual on expected for one group. ``smallest`` is the smallest |alpha - 1| that is flagged here."""

    group: Group
    index: tuple[int, ...]  # (expert,), (expert, channel), (token,)
    alpha: float
    se: float
    bias: float

    @property
    def smallest(self) -> float:
        """6 se + bias."""
        return SIGMAS * self.se + self.bias

    @property
    def flagged(self) -> bool:
        """Whether no honest result explains this gain."""
        return abs(self.alpha - 1.0) > self.smallest


@dataclass(frozen=True, slots=True)
class Estimates:
    """alpha, se and bias of all groups of one kind; NaN where the group contributes nothing."""

    group: Group
    alpha: torch.Tensor  # EXPERT [E], CHANNEL [E, H], TOKEN [M]
    se: torch.Tensor
    bias: torch.Tensor

    def smallest(self) -> torch.Tensor:
        """Smallest flagged |alpha - 1| per group."""
        return SIGMAS * self.se + self.bias

    def flagged(self) -> tuple[Gain, ...]:
        """Flagged groups, the most significant first."""
        excess = (self.alpha - 1.0).abs() / self.smallest()
        where = (excess > 1.0).nonzero()
        if not len(where):
            return ()
        where = where[excess[tuple(where.T)].argsort(descending=True)]
        values = [each[tuple(where.T)].tolist() for each in (self.alpha, self.se, self.bias)]
        return tuple(
            Gain(group=self.group, index=tuple(index), alpha=alpha, se=se, bias=bias)
            for index, alpha, se, bias in zip(where.tolist(), *values, strict=True)
        )

    def __getitem__(self, index: tuple[int, ...]) -> Gain:
        alpha, se, bias = (float(x[index]) for x in (self.alpha, self.se, self.bias))
        return Gain(group=self.group, index=index, alpha=alpha, se=se, bias=bias)


@dataclass(frozen=True, slots=True)
class Gains:
    """All three kinds."""

    expert: Estimates
    channel: Estimates
    token: Estimates

    def flagged(self) -> tuple[Gain, ...]:
        """Flagged groups: experts, then channels, then tokens, the most significant of each first."""
        return self.expert.flagged() + self.channel.flagged() + self.token.flagged()


def gains(answer: Answer, actual: torch.Tensor, experts: int) -> Gains:
    """Gains of ``actual`` [M, H] on ``answer``. Elements that are not finite, or whose interval is not, take no part.

    EXPERT: all experts at once, one regression over all elements. CHANNEL and TOKEN: each against honest others, because a batch
    seldom has more tokens than experts; what the others do shows in the residual and so in se.
    """
    known = round_to(answer.low, answer.output) == round_to(answer.high, answer.output)
    d = actual.to(torch.float64) - torch.where(known, round_to(answer.expected, answer.output), answer.expected)
    radius = torch.maximum(answer.high - answer.expected, answer.expected - answer.low)
    rounding = half_gaps(torch.maximum(answer.low.abs(), answer.high.abs()), actual.dtype)[1]
    usable = torch.isfinite(d) & torch.isfinite(radius) & torch.isfinite(rounding)
    noise = _Noise(
        difference=torch.where(usable, d, 0.0),
        radius=torch.where(usable, radius, 0.0),
        rounding=torch.where(usable, rounding, 0.0),
        weight=torch.where(usable, 1.0 / (rounding.square() / 3.0 + radius.square()), 0.0),
    )
    contribution = per_expert(answer, experts)  # [E, M, H]
    contribution = torch.where(usable & torch.isfinite(contribution), contribution, 0.0)
    return Gains(
        expert=_joint(contribution, noise, answer, _scalars(answer, experts)),
        channel=_single(Group.CHANNEL, contribution, noise, 1, answer.gain_bias),
        token=_single(Group.TOKEN, torch.where(usable, answer.expected, 0.0), noise, 1, answer.gain_bias),
    )


def per_expert(answer: Answer, experts: int) -> torch.Tensor:
    """Contributions by expert instead of by slot, [E, M, H] float64."""
    tokens, slots, hidden = answer.contributions.shape
    out = answer.contributions.new_zeros(tokens, experts, hidden)
    index = answer.routing.topk_ids.unsqueeze(2).expand(tokens, slots, hidden)
    return out.scatter_add_(1, index, answer.contributions).transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class _Noise:
    """What an honest difference consists of, elementwise [M, H]."""

    difference: torch.Tensor
    radius: torch.Tensor
    rounding: torch.Tensor  # half an ulp of the output
    weight: torch.Tensor  # 1 / variance, the radius taken as a deviation


def _scalars(answer: Answer, experts: int) -> float:
    """Relative error of the fp32 factors one token's elements share: router weight; a1 and a2 scale, each divided and multiplied in.

    What comes before the activation counts fourfold: act(g) * u is at most of degree 2, and twice that where silu or gelu is steepest
    relative to its value, short of the far left tail.
    """
    weights = answer.routing.topk_weights
    router = float(((router_weights(weights, experts, False).high - weights) / weights.clamp_min(U32)).max())
    scale = DIVISION + 2.0 * U32
    return 4.0 * (router + scale) + scale


def _joint(contribution: torch.Tensor, noise: _Noise, answer: Answer, scalars: float) -> Estimates:
    experts = contribution.shape[0]
    alpha, se, bias = (torch.full((experts,), torch.nan, dtype=torch.float64) for _ in range(3))
    active = (contribution != 0).flatten(1).any(1).nonzero().flatten()
    if len(active):
        root = noise.weight.sqrt().flatten()
        design = contribution[active].flatten(1) * root  # [A, n]
        size = design.norm(dim=1, keepdim=True)
        inverse = torch.linalg.pinv(design / size).T / size  # [A, n], rows of (X'WX)^-1 X'W^(1/2)
        estimator = inverse * root
        gain = inverse @ (root * noise.difference.flatten())
        residual = root * noise.difference.flatten() - gain @ design
        freedom = int((root > 0).sum()) - len(active)
        alpha[active] = 1.0 + gain
        se[active] = _standard_error(estimator, noise.rounding.flatten(), residual.square().sum(), inverse.square().sum(1), freedom)
        proven = estimator.abs() @ noise.radius.flatten()
        by_token = inverse.reshape(len(active), *contribution.shape[1:]).norm(dim=2)  # |W^-1/2 P_m|
        rounded = (noise.weight * noise.rounding.square() / 3.0).sum(1)  # what roundings add to |W^1/2 e|**2
        scatter = (residual.reshape(contribution.shape[1:]).square().sum(1) - rounded).clamp_min(0.0).sqrt()
        seen = _ALONG_OVER_ACROSS * by_token @ scatter
        shared = scalars + _by_row_scales(estimator.reshape(len(active), *contribution.shape[1:]), answer)
        bias[active] = answer.gain_bias + torch.minimum(proven, shared + seen)
    return Estimates(Group.EXPERT, alpha, se, bias)


def _by_row_scales(estimator: torch.Tensor, answer: Answer) -> torch.Tensor | float:
    """sum_mk |P_m c_mk| s_mk of estimator P [A, M, H]: [A]; 0 where no scale is in doubt."""
    doubt = answer.row_scale_doubt
    if doubt is None or not bool(doubt.any()):
        return 0.0
    return (torch.einsum("amh,mkh->amk", estimator, answer.contributions.nan_to_num()).abs() * doubt).sum((1, 2))


def _single(group: Group, regressor: torch.Tensor, noise: _Noise, dim: int, gain_bias: float) -> Estimates:
    """One gain per group over ``dim`` of [..., M, H]: tokens for a channel (regressor [E, M, H]), channels for a token ([M, H])."""
    weighted = regressor * noise.weight
    energy = (weighted * regressor).sum(dim)
    estimator = weighted / energy.unsqueeze(dim)
    gain = (estimator * noise.difference).sum(dim)
    residual = noise.difference - gain.unsqueeze(dim) * regressor
    used = (weighted != 0).to(torch.float64)
    chi2 = (used * noise.weight * residual.square()).sum(dim)
    freedom = (used.sum(dim) - 1.0).clamp_min(0.0)
    rounding = (estimator.square() * noise.rounding.square() / 3.0).sum(dim)
    scatter = torch.where(freedom > 0, chi2 / freedom.clamp_min(1.0) / energy, 0.0)
    se = torch.maximum(rounding, scatter).sqrt()
    bias = gain_bias + (estimator.abs() * noise.radius).sum(dim)
    nothing = energy == 0
    return Estimates(group, *(x.masked_fill(nothing, torch.nan) for x in (1.0 + gain, se, bias)))


def _standard_error(
    estimator: torch.Tensor, rounding: torch.Tensor, chi2: torch.Tensor, unit_variance: torch.Tensor, freedom: int
) -> torch.Tensor:
    floor = estimator.square() @ (rounding.square() / 3.0)
    scatter = chi2 / freedom * unit_variance if freedom > 0 else torch.zeros_like(floor)
    return torch.maximum(floor, scatter).sqrt()
