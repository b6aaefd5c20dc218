"""The verdict on single positions, with distributions written by hand."""

from __future__ import annotations

import math

import pytest

from deltafold import TokenLogprob, TopLogprob
from deltafold.parity.golden import GoldenStep, Origin
from deltafold.parity.tolerance import BFLOAT16, FLOAT32, Tolerance, tolerance_between
from deltafold.parity.verdict import Position, Verdict, judge, worst

TOLERANCE = Tolerance(tie=0.1, drift=0.2, kl=1.0, reason="test")


def golden(*logprobs: float) -> GoldenStep:
    """Tokens 0, 1, ... with these logprobs; token 0 chosen."""
    return GoldenStep(0, logprobs[0], tuple(enumerate(logprobs)))


def ours(chosen: int, *logprobs: float) -> TokenLogprob:
    """The same tokens in our order of likelihood."""
    order = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])
    top = tuple(TopLogprob(i, logprobs[i]) for i in order)
    return TokenLogprob(chosen, logprobs[chosen], order.index(chosen) + 1, top)


def judged(step: GoldenStep, entry: TokenLogprob, tolerance: Tolerance = TOLERANCE) -> Position:
    return judge(3, step, entry, entry.token_id, tolerance)


def test_equal_distributions_are_identical() -> None:
    position = judged(golden(-0.5, -1.5, -3.0), ours(0, -0.5, -1.5, -3.0))
    assert position.verdict is Verdict.IDENTICAL
    assert (position.index, position.rank, position.drift, position.kl) == (3, 1, 0.0, 0.0)
    assert position.golden_margin == position.our_margin == 1.0
    assert position.golden_gap == position.our_gap == 0.0


def test_tokens_within_tolerance_on_both_sides_are_a_near_tie() -> None:
    position = judged(golden(-0.70, -0.75, -3.0), ours(1, -0.76, -0.69, -3.0))
    assert position.verdict is Verdict.NEAR_TIE
    assert position.rank == 2
    assert position.golden_gap == pytest.approx(0.05)
    assert position.our_gap == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("step", "entry"),
    [
        pytest.param(golden(-0.60, -0.75, -3.0), ours(1, -0.70, -0.69, -3.0), id="the golden run was sure"),
        pytest.param(golden(-0.70, -0.71, -3.0), ours(1, -0.82, -0.60, -3.0), id="we are sure"),
        pytest.param(golden(-0.70, -0.71, -3.0), ours(2, -0.70, -0.71, -3.0), id="we chose an unlikely token"),
        pytest.param(golden(-0.70, -0.72, -3.0), ours(1, -0.62, -0.85, -3.0), id="chosen against our own logits"),
        pytest.param(golden(-0.50, -1.50, -3.0), ours(0, -0.50, -1.75, -3.0), id="same token, another has drifted"),
        pytest.param(golden(-0.50, -1.50, -3.0), ours(0, -0.75, -1.50, -3.0), id="same token, itself drifted"),
    ],
)
def test_all_else_is_a_mismatch(step: GoldenStep, entry: TokenLogprob) -> None:
    assert judged(step, entry).verdict is Verdict.MISMATCH


def test_unlikely_tokens_may_drift() -> None:
    assert judged(golden(-0.02, -4.5, -6.0), ours(0, -0.02, -4.5, -9.0)).verdict is Verdict.IDENTICAL
    assert judged(golden(-0.02, -4.5, -6.0), ours(0, -0.02, -4.9, -6.0)).verdict is Verdict.MISMATCH


def test_token_that_one_side_does_not_list_counts_as_its_last() -> None:
    entry = TokenLogprob(7, -0.1, 1, (TopLogprob(7, -0.1), TopLogprob(8, -5.0)))
    position = judged(golden(-0.1, -3.0), entry)
    assert position.verdict is Verdict.MISMATCH
    assert position.golden_gap == pytest.approx(2.9)
    assert position.our_gap == pytest.approx(4.9)
    assert position.drift == pytest.approx(4.9)
    assert position.rank == 3


def test_divergence_is_that_of_the_listed_tokens_and_the_rest() -> None:
    p, q = (0.5, 0.3), (0.4, 0.5)
    position = judged(golden(*map(math.log, p)), ours(1, *map(math.log, q)))
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.5) + 0.2 * math.log(0.2 / 0.1)
    assert position.kl == pytest.approx(expected)


def test_worst_verdict_wins() -> None:
    assert worst([]) is Verdict.IDENTICAL
    assert worst([Verdict.NEAR_TIE, Verdict.IDENTICAL]) is Verdict.NEAR_TIE
    assert worst([Verdict.NEAR_TIE, Verdict.MISMATCH, Verdict.IDENTICAL]) is Verdict.MISMATCH


def origin(dtype: str = "float32", residual_dtype: str = "float32") -> Origin:
    return Origin("deltafold", "0", "2", dtype, residual_dtype, "portable", "cpu")


@pytest.mark.parametrize("coarse", [origin("bfloat16"), origin("float32", "bfloat16"), origin("unknown", "unknown")])
def test_tolerance_follows_the_coarser_side(coarse: Origin) -> None:
    assert tolerance_between(origin(), origin()) == FLOAT32
    for pair in ((coarse, origin()), (origin(), coarse)):
        found = tolerance_between(*pair)
        assert (found.tie, found.drift, found.kl) == (BFLOAT16.tie, BFLOAT16.drift, BFLOAT16.kl)
        assert found.reason


def test_given_tolerance_replaces_the_default() -> None:
    found = tolerance_between(origin(), origin(), {"tie": 0.25, "drift": None, "kl": None})
    assert (found.tie, found.drift) == (0.25, FLOAT32.drift)
    assert "tie given" in found.reason
