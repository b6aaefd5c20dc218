"""Holds an engine to a golden run, on two paths, so that neither a tie nor a path hides a fault.

Decode: greedy generation; after a position where the tokens part it starts again behind the golden run's token.
Prefill: the golden run's tokens as a prompt (teacher forcing). `verdict.py` judges positions, `report.py` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltafold import MAX_TOP_LOGPROBS, Engine, GoldenError, NumericalError, SamplingParams, TokenLogprob
from deltafold.parity.golden import Golden, GoldenPrompt, ModelIdentity, Origin
from deltafold.parity.record import EngineSource, model_identity
from deltafold.parity.tolerance import Tolerance, tolerance_between
from deltafold.parity.verdict import Position, Verdict, judge, worst


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """One prompt. `decode` ends with its first mismatch. `failure` says what is wrong beyond single positions: logits
    that were not finite, or a mean divergence beyond tolerance."""

    index: int
    output_token_ids: tuple[int, ...]  # of the undisturbed greedy run
    num_matched: int  # of those, at the golden run's positions
    first_divergence: int | None
    decode: tuple[Position, ...]
    prefill: tuple[Position, ...]
    kl: float  # mean over `prefill`, nats; 0 if that is empty
    failure: str | None
    verdict: Verdict

    @property
    def divergence(self) -> Position | None:
        """The position where the tokens first part, with both margins."""
        found = (position for position in self.decode if position.index == self.first_divergence)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole run."""

    golden: Origin
    ours: Origin
    model: ModelIdentity
    tolerance: Tolerance
    num_tokens: int
    prompts: tuple[PromptComparison, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(prompt.verdict for prompt in self.prompts)

    @property
    def num_matched(self) -> int:
        return sum(prompt.num_matched for prompt in self.prompts)

    def count(self, verdict: Verdict) -> int:
        """How many prompts have this verdict."""
        return sum(prompt.verdict is verdict for prompt in self.prompts)

    @property
    def positions(self) -> list[Position]:
        """All judged positions of both paths."""
        return [position for prompt in self.prompts for position in (*prompt.decode, *prompt.prefill)]

    @property
    def mean_kl(self) -> float | None:
        """Mean divergence a teacher-forced token (nats); None if no token could be forced."""
        values = [position.kl for prompt in self.prompts for position in prompt.prefill]
        return sum(values) / len(values) if values else None


def compare(golden: Golden, engine: Engine, tolerances: Mapping[str, float | None] | None = None) -> Comparison:
    """Runs `engine` on a golden run's prompts. `tolerances` (tie, drift, kl in nats) override those of the dtypes.

    Raises:
        GoldenError: the golden run is of another model or tokenizer.
        OptionError: a tolerance is not a positive number.
    """
    ours = EngineSource(engine).origin
    limit = tolerance_between(golden.origin, ours, tolerances)
    check_identity(golden, engine)
    forced = _force(golden, engine, limit)
    runs = [_DecodePath(prompt, limit) for prompt in golden.prompts]
    while pending := [run for run in runs if run.is_pending]:
        _generate(engine, pending)
    return Comparison(
        golden=golden.origin,
        ours=ours,
        model=golden.model,
        tolerance=limit,
        num_tokens=golden.num_tokens,
        prompts=tuple(_result(i, run, *found, limit) for i, (run, found) in enumerate(zip(runs, forced, strict=True))),
    )


def check_identity(golden: Golden, engine: Engine) -> None:
    """Raises GoldenError unless the engine has the golden run's model and tokenizer, and room for its prompts."""
    ours, theirs = model_identity(engine), golden.model
    for name in ("vocab_size", "fingerprint"):
        if getattr(ours, name) != getattr(theirs, name):
            raise GoldenError(
                f"another model: model.{name} of the golden run is {getattr(theirs, name)}, "
                f"that of {ours.name!r} is {getattr(ours, name)}"
            )
    if ours.tokenizer != theirs.tokenizer:
        raise GoldenError(
            f"another tokenizer: model.tokenizer of the golden run is {theirs.tokenizer}, ours is {ours.tokenizer}"
        )
    for i, prompt in enumerate(golden.prompts):
        if prompt.text is not None and tuple(engine.encode(prompt.text)) != prompt.token_ids:
            raise GoldenError(f"prompts[{i}].token_ids are not what the tokenizer makes of prompts[{i}].text")
        if (length := len(prompt.token_ids) + len(prompt.steps) + 1) > engine.max_model_len:
            raise GoldenError(
                f"prompts[{i}] needs {length} tokens, the engine has max_model_len {engine.max_model_len}"
            )


class _DecodePath:
    """One prompt's greedy generation, restarted behind each position where the tokens part."""

    def __init__(self, prompt: GoldenPrompt, tolerance: Tolerance) -> None:
        self.prompt = prompt
        self._tolerance = tolerance
        self.positions: list[Position] = []
        self.output_token_ids: tuple[int, ...] = ()
        self.failure: str | None = None
        self._num_runs = 0

    @property
    def is_pending(self) -> bool:
        is_whole = len(self.positions) == len(self.prompt.steps)
        has_failed = bool(self.positions) and self.positions[-1].verdict is Verdict.MISMATCH
        return not (is_whole or has_failed or self.failure)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What to generate from: the prompt and the golden tokens already judged."""
        return self.prompt.token_ids + self.prompt.output_token_ids[: len(self.positions)]

    @property
    def num_left(self) -> int:
        return len(self.prompt.steps) - len(self.positions)

    def take(self, entries: Sequence[TokenLogprob], failure: str | None) -> None:
        """Judges a run's output up to where it leaves the golden run or its verdict is a mismatch."""
        if self._num_runs == 0:
            self.output_token_ids = tuple(entry.token_id for entry in entries)
        self._num_runs += 1
        for entry in entries:
            index = len(self.positions)
            position = judge(index, self.prompt.steps[index], entry, entry.token_id, self._tolerance)
            self.positions.append(position)
            if position.verdict is not Verdict.IDENTICAL:
                return
        self.failure = failure if entries or failure else "decode: the engine ended the request without a token"


def _generate(engine: Engine, runs: Sequence[_DecodePath]) -> None:
    """One more greedy run of each; they share the engine's steps."""
    streams = []
    for run in runs:
        params = SamplingParams(max_tokens=run.num_left, temperature=0, ignore_eos=True, logprobs=MAX_TOP_LOGPROBS)
        streams.append(engine.stream(run.token_ids, params))
    for run, stream in zip(runs, streams, strict=True):
        entries: list[TokenLogprob] = []
        failure = None
        try:
            for output in stream:
                entries += output.logprobs or ()
        except NumericalError as error:
            failure = f"decode, position {len(run.positions) + len(entries)}: {error}"
        run.take(entries, failure)


def _force(golden: Golden, engine: Engine, tolerance: Tolerance) -> list[tuple[tuple[Position, ...], str | None]]:
    """Teacher forcing: every position judged with the golden run's tokens before it, and what broke it off."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=MAX_TOP_LOGPROBS)
    texts = [prompt.token_ids + prompt.output_token_ids for prompt in golden.prompts]
    try:
        completions = engine.complete_tokens(texts, params)
    except NumericalError as error:
        completions = list(error.completions)
    results = []
    for prompt, completion in zip(golden.prompts, completions, strict=True):
        entries = (completion.prompt_logprobs or ())[len(prompt.token_ids) :]
        positions = tuple(
            judge(i, step, entry, entry.top[0].token_id, tolerance)
            for i, (step, entry) in enumerate(zip(prompt.steps, entries, strict=False))  # fewer where it broke off
            if entry is not None
        )
        failure = None if completion.error is None else f"prefill: {completion.error}"
        results.append((positions, failure))
    return results


def _result(
    index: int, run: _DecodePath, prefill: tuple[Position, ...], prefill_failure: str | None, tolerance: Tolerance
) -> PromptComparison:
    kl = sum(position.kl for position in prefill) / max(1, len(prefill))
    failure = run.failure or prefill_failure
    if failure is None and kl > tolerance.kl:
        failure = f"mean divergence {kl:.2e} nats, tolerance {tolerance.kl:.0e}"
    verdicts = [position.verdict for position in (*run.positions, *prefill)]
    golden_ids = run.prompt.output_token_ids
    parted = (p.index for p in run.positions if p.our_token != p.golden_token)
    return PromptComparison(
        index=index,
        output_token_ids=run.output_token_ids,
        num_matched=sum(ours == theirs for ours, theirs in zip(run.output_token_ids, golden_ids, strict=False)),
        first_divergence=next(parted, None),
        decode=tuple(run.positions),
        prefill=prefill,
        kl=kl,
        failure=failure,
        verdict=Verdict.MISMATCH if failure else worst(verdicts),
    )
