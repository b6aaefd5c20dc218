"""Whole comparisons on a tiny checkpoint: a correct engine, ties, drift behind ties, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoints import base_config, random_prompt, write_checkpoint
from tests.parity.goldens_of import NUM_STEPS, tiny_golden, with_step

from deltafold import Engine, GoldenError, OptionError, SamplingParams
from deltafold.parity.compare import compare
from deltafold.parity.golden import Golden, GoldenPrompt, GoldenStep
from deltafold.parity.record import golden_step
from deltafold.parity.verdict import Verdict

TIE_AT = 3


@pytest.fixture(scope="module")
def golden(engine: Engine) -> Golden:
    return tiny_golden(engine)


@pytest.fixture(scope="module")
def tied(engine: Engine, golden: Golden) -> Golden:
    """A golden run that took the second best token of the first prompt at TIE_AT, as if it were just the best."""
    prompt = golden.prompts[0]
    (best, logprob), (second, _), *others = prompt.steps[TIE_AT].top
    step = GoldenStep(second, logprob, ((second, logprob), (best, logprob), *others))
    text = [*prompt.token_ids, *prompt.output_token_ids[:TIE_AT], second]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_STEPS - TIE_AT - 1, logprobs=20)
    rest = [golden_step(entry) for entry in engine.complete_tokens(text, params).logprobs or ()]
    changed = GoldenPrompt(None, prompt.token_ids, (*prompt.steps[:TIE_AT], step, *rest))
    return replace(golden, prompts=(changed, golden.prompts[1]))


def test_engine_is_identical_to_its_own_run(engine: Engine, golden: Golden) -> None:
    comparison = compare(golden, engine)
    assert comparison.verdict is Verdict.IDENTICAL
    assert comparison.num_matched == comparison.num_tokens == 2 * NUM_STEPS
    for prompt in comparison.prompts:
        assert [p.index for p in prompt.decode] == [p.index for p in prompt.prefill] == list(range(NUM_STEPS))
        assert prompt.first_divergence is None
        assert max(p.drift for p in prompt.prefill) < 1e-4
    assert comparison.mean_kl is not None
    assert comparison.mean_kl < 1e-7


def test_other_batch_is_identical(tiny_folder: Path, golden: Golden) -> None:
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "prefix_cache": False}
    with Engine.load(str(tiny_folder), device="cpu", **options) as alone:  # type: ignore[arg-type]
        assert compare(golden, alone).verdict is Verdict.IDENTICAL


def test_tie_is_reported_with_both_margins_and_generation_goes_on_behind_it(engine: Engine, tied: Golden) -> None:
    gap = tied.prompts[0].steps[TIE_AT].logprob - compare(tied, engine).prompts[0].prefill[TIE_AT].our_gap
    assert gap < 0  # the tie is real only on the golden side, so the tolerance is made to fit
    comparison = compare(tied, engine, {"tie": 20.0, "drift": 20.0, "kl": 20.0})
    first = comparison.prompts[0]
    assert comparison.verdict is first.verdict is Verdict.NEAR_TIE
    assert comparison.prompts[1].verdict is Verdict.IDENTICAL
    assert first.first_divergence == TIE_AT
    assert first.divergence is not None
    assert (first.divergence.rank, first.divergence.golden_margin) == (2, 0.0)
    assert first.divergence.our_margin == pytest.approx(first.divergence.our_gap)
    assert [position.index for position in first.decode] == list(range(NUM_STEPS))
    assert {p.verdict for p in first.decode[TIE_AT + 1 :]} == {Verdict.IDENTICAL}
    assert first.num_matched < NUM_STEPS  # the undisturbed run went another way


@pytest.mark.parametrize("index", [TIE_AT + 1, NUM_STEPS - 1])
def test_tie_does_not_hide_what_follows(engine: Engine, tied: Golden, index: int) -> None:
    """A token that the engine would never choose, behind a tie."""

    def swap(step: GoldenStep) -> GoldenStep:
        (_, best), *others, (last, _) = step.top
        return GoldenStep(last, best, ((last, best), *others, (step.token_id, step.top[-1][1])))

    gap = compare(tied, engine).prompts[0].prefill[TIE_AT].our_gap
    limits = {"tie": gap + 1e-3, "drift": 50.0, "kl": 50.0}
    assert compare(tied, engine, limits).verdict is Verdict.NEAR_TIE
    spoilt = compare(with_step(tied, 0, index, swap), engine, limits).prompts[0]
    assert spoilt.verdict is Verdict.MISMATCH
    assert spoilt.first_divergence == TIE_AT
    assert spoilt.decode[-1].index == index
    assert spoilt.decode[-1].verdict is spoilt.prefill[index].verdict is Verdict.MISMATCH
    assert spoilt.prefill[index].rank > 2


def test_mean_divergence_beyond_tolerance_is_a_mismatch(engine: Engine, golden: Golden) -> None:
    def flatten(step: GoldenStep) -> GoldenStep:
        lowered = tuple((token_id, logprob - 0.01) for token_id, logprob in step.top)
        return GoldenStep(step.token_id, step.logprob - 0.01, lowered)

    for index in range(NUM_STEPS):
        golden = with_step(golden, 1, index, flatten)
    limits = {"tie": 1.0, "drift": 1.0}
    comparison = compare(golden, engine, limits)
    assert [prompt.verdict for prompt in comparison.prompts] == [Verdict.IDENTICAL, Verdict.MISMATCH]
    assert "mean divergence" in (comparison.prompts[1].failure or "")
    assert compare(golden, engine, {**limits, "kl": 1.0}).verdict is Verdict.IDENTICAL


def test_other_model_and_tokenizer_are_refused_by_name(engine: Engine, golden: Golden, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, base_config(), seed=1)
    with (
        Engine.load(str(tmp_path), device="cpu", max_num_seqs=2) as other,
        pytest.raises(GoldenError, match=r"another model: model\.fingerprint"),
    ):
        compare(golden, other)
    model = replace(golden.model, tokenizer="0" * 32)
    with pytest.raises(GoldenError, match=r"another tokenizer: model\.tokenizer"):
        compare(replace(golden, model=model), engine)


def test_text_that_encodes_otherwise_is_refused(engine: Engine, golden: Golden) -> None:
    prompts = (replace(golden.prompts[0], text="In the beginning"), golden.prompts[1])
    with pytest.raises(GoldenError, match=r"prompts\[0\]\.token_ids"):
        compare(replace(golden, prompts=prompts), engine)


def test_prompt_too_long_for_the_engine_is_refused(tiny_folder: Path, engine: Engine, golden: Golden) -> None:
    with (
        Engine.load(str(tiny_folder), device="cpu", max_num_seqs=2, max_model_len=64) as small,
        pytest.raises(GoldenError, match=r"prompts\[1\] needs 83 tokens, the engine has max_model_len 64"),
    ):
        compare(golden, small)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_tolerance_must_be_positive(engine: Engine, golden: Golden, value: float) -> None:
    with pytest.raises(OptionError, match="tie tolerance must be a positive number"):
        compare(golden, engine, {"tie": value})


def test_random_prompts_of_the_tests_are_not_degenerate(golden: Golden) -> None:
    assert golden.prompts[0].token_ids == tuple(random_prompt(0, 5))
    assert len(set(golden.prompts[0].output_token_ids)) > NUM_STEPS // 2
