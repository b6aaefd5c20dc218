"""The verdict on one position: the golden run's distribution beside ours.

`identical`: the same token, every likely token's logprob within tolerance. `near_tie`: another token, and on both sides
the two tokens are within tolerance of each other. `mismatch`: anything else, an equal token with a drifted logprob too.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from deltafold import TokenLogprob
from deltafold.parity.golden import GoldenStep
from deltafold.parity.tolerance import LIKELY, Tolerance


class Verdict(enum.StrEnum):
    """From best to worst."""

    IDENTICAL = "identical"
    NEAR_TIE = "near_tie"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Position:
    """One position, both sides. Gaps, margins, drift and KL are in nats.

    `rank` is the golden token's place in our distribution. A margin is the best token's logprob less the second's; a
    gap is the best token's logprob less that of the token the other side chose. `drift` is the largest difference of
    a likely token's logprob; `kl` is the divergence golden || ours over the golden run's top tokens and the rest.
    """

    index: int
    golden_token: int
    our_token: int
    rank: int
    golden_margin: float
    our_margin: float
    golden_gap: float
    our_gap: float
    drift: float
    kl: float
    verdict: Verdict


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several; identical if there are none."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.IDENTICAL)


def judge(index: int, golden: GoldenStep, ours: TokenLogprob, our_token: int, tolerance: Tolerance) -> Position:
    """Compares position `index`: the golden step with our distribution after the same tokens and our choice there."""
    found = {best.token_id: best.logprob for best in ours.top}
    found[ours.token_id] = ours.logprob
    floor = ours.top[-1].logprob  # a token that is not listed has at most this

    def our_logprob(token_id: int) -> float:
        return found.get(token_id, floor)

    best = ours.top[0].logprob
    golden_top = dict(golden.top)
    golden_gap = golden.logprob - golden_top.get(our_token, golden.top[-1][1])
    our_gap = best - our_logprob(golden.token_id)
    drift = max(
        _difference(value, token_id, found, floor) for token_id, value in golden.top if _is_likely(value, golden)
    )
    # The last of the three is a sampler's fault: it chose what its own logits do not favour.
    gap = max(golden_gap, our_gap, best - our_logprob(our_token))
    if gap > tolerance.tie or drift > tolerance.drift:
        verdict = Verdict.MISMATCH
    elif our_token != golden.token_id:
        verdict = Verdict.NEAR_TIE
    else:
        verdict = Verdict.IDENTICAL
    return Position(
        index=index,
        golden_token=golden.token_id,
        our_token=our_token,
        rank=_rank(golden.token_id, ours, found),
        golden_margin=golden.margin,
        our_margin=ours.top[0].logprob - ours.top[1].logprob,
        golden_gap=golden_gap,
        our_gap=our_gap,
        drift=drift,
        kl=_divergence(golden, found),
        verdict=verdict,
    )


def _rank(token_id: int, ours: TokenLogprob, found: dict[int, float]) -> int:
    """The token's place in our distribution; of a token we do not list, the best it can be."""
    if token_id == ours.token_id:
        return ours.rank
    if token_id not in found:
        return len(found) + 1
    return 1 + sum(value > found[token_id] for value in found.values())


def _is_likely(logprob: float, golden: GoldenStep) -> bool:
    return logprob >= min(LIKELY, golden.logprob)


def _difference(golden: float, token_id: int, found: dict[int, float], floor: float) -> float:
    """|golden - ours|; of a token we do not list, the least it can be."""
    return abs(golden - found[token_id]) if token_id in found else max(0.0, golden - floor)


def _divergence(golden: GoldenStep, found: dict[int, float]) -> float:
    """KL(golden || ours) over the golden run's top tokens and one bin for all others: a lower bound of the whole."""
    common = [(value, found[token_id]) for token_id, value in golden.top if token_id in found]
    total = sum(math.exp(p) * (p - q) for p, q in common)
    rest_p = 1 - sum(math.exp(p) for p, _ in common)
    rest_q = 1 - sum(math.exp(q) for _, q in common)
    if rest_p > 0 and rest_q > 0:
        total += rest_p * math.log(rest_p / rest_q)
    return max(0.0, total)
