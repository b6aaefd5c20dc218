"""The sampler against formulas written out token by token, and its random stream against chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deltafold.runner.sampler import SamplingRow, sample, token_logprobs
from deltafold.types import LOGPROB_FLOOR, SamplingParams

LOGITS = [2.0, 1.5, 1.5, 0.3, -0.4, -1.0, 0.9, -3.0]
VOCAB = len(LOGITS)
NUM_DRAWS = 3000


def literal_probs(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]):
    """What each token's probability should be, by the definitions of SamplingParams, one token at a time."""
    values = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    for i in set(prompt) | set(output):
        values[i] = values[i] / params.repetition_penalty if values[i] > 0 else values[i] * params.repetition_penalty
    for i, count in Counter(output).items():
        values[i] -= params.presence_penalty + params.frequency_penalty * count
    if params.temperature == 0:
        return [float(i == values.index(max(values))) for i in range(len(values))]
    weights = [math.exp((x - max(values)) / params.temperature) for x in values]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = [i for i in order if probs[i] >= params.min_p * max(probs) * (1 - 1e-6)]
    if params.top_k:
        order = order[: params.top_k]
    total = sum(probs[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += probs[i] / total
        if reached >= params.top_p - 1e-9:
            break
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(probs))]


def rows_of(params: SamplingParams, seeds: Sequence[int], prompt=(), output=()) -> list[SamplingRow]:
    return [SamplingRow(params, seed, prompt, output) for seed in seeds]


def draw(params: SamplingParams, prompt=(), output=(), num_draws: int = NUM_DRAWS) -> list[int]:
    logits = torch.tensor(LOGITS).expand(num_draws, VOCAB).contiguous()
    return sample(logits, rows_of(params, range(num_draws), prompt, output)).tolist()


def chi_square(drawn: Sequence[int], probs: Sequence[float]) -> float:
    counts = Counter(drawn)
    return sum((counts[i] - len(drawn) * p) ** 2 / (len(drawn) * p) for i, p in enumerate(probs) if p > 0)


def chi_square_limit(num_cells: int) -> float:
    """About the 1 - 1e-5 quantile with `num_cells - 1` degrees of freedom (Wilson and Hilferty)."""
    df = max(1, num_cells - 1)
    return df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3


CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_k splits a tie": {"top_k": 2},
    "top_k beyond the vocabulary": {"top_k": 100},
    "top_p": {"top_p": 0.7},
    "top_p tiny": {"top_p": 1e-6},
    "top_p almost all": {"top_p": 0.9999},
    "min_p": {"min_p": 0.3},
    "min_p one": {"min_p": 1.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": {0: -2.0, 5: 3.5}},
    "all": {
        "temperature": 1.3,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 1.0},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_literal_formula(name: str) -> None:
    params = SamplingParams(**CASES[name])
    prompt, output = (3, 3, 7), (0, 0, 4, 0, 6)  # both matter to the penalties
    probs = literal_probs(LOGITS, params, prompt, output)
    drawn = draw(params, prompt, output)
    assert {i for i in range(VOCAB) if probs[i] == 0}.isdisjoint(drawn)
    assert chi_square(drawn, probs) < chi_square_limit(sum(p > 0 for p in probs))


@pytest.mark.parametrize("name", CASES)
def test_greedy_takes_the_best_after_penalties_and_bias(name: str) -> None:
    params = SamplingParams(**(CASES[name] | {"temperature": 0}))
    prompt, output = (3, 3, 7), (0, 0, 4, 0, 6)
    expected = literal_probs(LOGITS, params, prompt, output).index(1.0)
    assert draw(params, prompt, output, num_draws=3) == [expected] * 3


def test_the_formula_tells_the_cases_apart() -> None:
    """No case's draws would pass for another's: the chi-square test can fail."""
    prompt, output = (3, 3, 7), (0, 0, 4, 0, 6)
    plain = draw(SamplingParams(), prompt, output)
    for name, values in CASES.items():
        probs = literal_probs(LOGITS, SamplingParams(**values), prompt, output)
        if name not in ("plain", "top_k beyond the vocabulary", "top_p almost all"):
            outside = any(probs[i] == 0 for i in plain)
            assert outside or chi_square(plain, probs) > chi_square_limit(VOCAB)


def test_greedy_breaks_ties_by_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, rows_of(SamplingParams(temperature=0), [1, 2])).tolist() == [1, 0]


def test_min_p_one_keeps_all_the_best_and_only_them() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 4.999]]).expand(200, 4).contiguous()
    assert set(sample(logits, rows_of(SamplingParams(min_p=1.0), range(200))).tolist()) == {1, 2}


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
def test_top_p_reached_exactly_keeps_no_more(top_p: float, num_kept: int) -> None:
    """Four equal tokens are a quarter each without rounding; of equals the lower id is kept."""
    drawn = sample(torch.zeros(200, 4), rows_of(SamplingParams(top_p=top_p), range(200))).tolist()
    assert set(drawn) == set(range(num_kept))


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-42, 1e-60, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([0.5, -2.0, 3.0, 2.9]).expand(50, 4).contiguous()
    assert set(sample(logits, rows_of(SamplingParams(temperature=temperature), range(50))).tolist()) == {2}


@pytest.mark.parametrize("penalty", [1e-30, 1e-40, 1e-300])
def test_a_tiny_repetition_penalty_stays_finite(penalty: float) -> None:
    """It makes a seen token certain, or its negative logit zero; never NaN."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
        assert set(draw(params, prompt=(6,), num_draws=20)) == {6}


def test_bias_forces_and_forbids() -> None:
    assert set(draw(SamplingParams(logit_bias={7: 100}), num_draws=200)) == {7}
    assert 0 not in draw(SamplingParams(logit_bias={0: -100}))
    greedy = SamplingParams(temperature=0, logit_bias={0: -100})
    assert draw(greedy, num_draws=1) == [1]


def test_extreme_logits_are_drawn_as_they_stand() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-3e38, 3e38, -3e38]])
    assert sample(logits, rows_of(SamplingParams(), [0, 1])).tolist() == [0, 1]


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 500, generator=generator)
    settings = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0}, {"temperature": 2.0}]
    rows = [SamplingRow(SamplingParams(**s), 40 + i, (1, 2), (3, 4)) for i, s in enumerate(settings)]
    together = sample(logits, rows).tolist()
    assert together == [int(sample(logits[i : i + 1], [row])) for i, row in enumerate(rows)]
    assert together == sample(logits.flip(0), rows[::-1]).tolist()[::-1]


def test_draws_change_with_seed_and_position() -> None:
    logits = torch.zeros(1, 1000)
    params = SamplingParams()
    by_seed = [int(sample(logits, [SamplingRow(params, seed, (), ())])) for seed in range(60)]
    by_position = [int(sample(logits, [SamplingRow(params, 9, (), [0] * i)])) for i in range(60)]
    assert len(set(by_seed)) > 50
    assert len(set(by_position)) > 50
    assert by_position == [int(sample(logits, [SamplingRow(params, 9, (5,), [7] * i)])) for i in range(60)]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_one_seed_s_stream_is_uniform_and_has_no_memory(seed: int) -> None:
    """Draws at successive positions of one request, alone and in pairs, from four equal tokens."""
    num_draws = 4000
    rows = [SamplingRow(SamplingParams(), seed & (2**63 - 1), (), range(i)) for i in range(num_draws)]
    drawn = sample(torch.zeros(num_draws, 4), rows).tolist()
    assert chi_square(drawn, [0.25] * 4) < chi_square_limit(4)
    pairs = [4 * a + b for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
    assert chi_square(pairs, [1 / 16] * 16) < chi_square_limit(16)


def test_neighbouring_seeds_are_independent() -> None:
    drawn = sample(torch.zeros(8000, 4), rows_of(SamplingParams(), range(8000))).tolist()
    pairs = [4 * a + b for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
    assert chi_square(pairs, [1 / 16] * 16) < chi_square_limit(16)


def random_logits() -> Tensor:
    return 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(1))


def test_logprobs_are_the_log_softmax_of_the_logits() -> None:
    logits = random_logits()
    chosen, counts = [7, 0, 299, 150], [5, 0, 64, 1]
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, found in enumerate(token_logprobs(logits, chosen, counts)):
        order = expected[row].argsort(descending=True)
        assert found.token_id == chosen[row]
        assert found.logprob == pytest.approx(float(expected[row, chosen[row]]), abs=1e-6)
        assert found.rank == order.tolist().index(chosen[row]) + 1
        assert [top.token_id for top in found.top] == order[: counts[row]].tolist()
        for top in found.top:
            assert top.logprob == pytest.approx(float(expected[row, top.token_id]), abs=1e-6)


def test_logprobs_have_a_floor() -> None:
    logits = torch.tensor([[0.0, -1e9, -9998.0, float("-inf")]])
    assert token_logprobs(logits, [1], [4])[0].logprob == LOGPROB_FLOOR
    tops = token_logprobs(logits, [0], [4])[0].top
    assert [top.logprob for top in tops[:2]] == pytest.approx([0.0, -9998.0])
    assert [top.logprob for top in tops[2:]] == [LOGPROB_FLOOR, LOGPROB_FLOOR]


def test_equal_logits_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert [token_logprobs(logits, [i], [0])[0].rank for i in range(4)] == [3, 1, 1, 4]


def test_more_logprobs_than_tokens() -> None:
    assert len(token_logprobs(torch.zeros(1, 3), [0], [20])[0].top) == 3
