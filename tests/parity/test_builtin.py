"""The gate: the built-in model against golden runs that transformers made in float32 (`scripts/make-goldens`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.parity.goldens_of import BUILTIN_GOLDEN

from deltafold import Engine
from deltafold.parity.compare import compare
from deltafold.parity.golden import Golden, load
from deltafold.parity.prompts import Prompt
from deltafold.parity.record import EngineSource, record
from deltafold.parity.verdict import Verdict


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load(BUILTIN_GOLDEN)


@pytest.fixture(scope="module")
def builtin() -> Iterator[Engine]:
    with Engine.load(device="cpu", max_num_seqs=64, show_progress=False) as engine:
        yield engine


def test_golden_runs_are_what_the_gate_needs(golden: Golden) -> None:
    assert (golden.origin.engine, golden.origin.dtype) == ("transformers", "float32")
    assert len(golden.prompts) == 16
    assert {len(prompt.steps) for prompt in golden.prompts} == {32}
    lengths = [len(prompt.token_ids) for prompt in golden.prompts]
    assert min(lengths) < 16
    assert max(lengths) > 64  # some prefills have more than one chunk
    assert all(prompt.text for prompt in golden.prompts)


def test_float32_is_identical(golden: Golden, builtin: Engine) -> None:
    comparison = compare(golden, builtin)
    assert comparison.verdict is Verdict.IDENTICAL
    assert comparison.num_matched == 512
    assert max(position.drift for position in comparison.positions) < 1e-4


def test_bfloat16_is_free_of_mismatches(golden: Golden) -> None:
    with Engine.load(device="cpu", dtype="bfloat16", max_num_seqs=16, show_progress=False) as engine:
        comparison = compare(golden, engine)
    assert comparison.verdict is not Verdict.MISMATCH
    assert max(position.drift for position in comparison.positions) > 1e-2  # it did round


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 5, "max_num_batched_tokens": 64, "prefix_cache": False}, {"dtype": "bfloat16"}],
    ids=["other batches", "bfloat16"],
)
def test_correct_engines_have_no_mismatch_on_64_prompts_of_128_tokens(
    options: dict[str, object], builtin: Engine
) -> None:
    text = (BUILTIN_GOLDEN.parents[3] / "src/deltafold/builtin/heldout_sample.txt").read_text(encoding="utf-8")
    ids = builtin.encode(text)
    prompts = [Prompt(None, tuple(ids[i * 200 : i * 200 + 32 + i])) for i in range(64)]
    golden = record(prompts, EngineSource(builtin), builtin, max_tokens=128, ignore_eos=True)
    with Engine.load(device="cpu", show_progress=False, **options) as engine:  # type: ignore[arg-type]
        comparison = compare(golden, engine)
    assert comparison.count(Verdict.MISMATCH) == 0
    if "dtype" not in options:
        assert comparison.verdict is Verdict.IDENTICAL
