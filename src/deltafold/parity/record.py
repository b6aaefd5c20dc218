"""Records a golden run: prompts through a source of greedy steps, stamped with the model's and tokenizer's identity.

The sources are our engine (here), `transformers` (`from_transformers.py`) and a server (`from_server.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import deltafold
from deltafold import Engine, SamplingParams, TokenLogprob
from deltafold.parity.golden import NUM_TOP, Golden, GoldenPrompt, GoldenStep, ModelIdentity, Origin
from deltafold.parity.prompts import Prompt

_PROBE = "The 1st test, naïve: 12345 words\n\n  don't  SPLIT - 你好世界 étude; e=mc² 🙂\t"
"""Text whose ids depend on how a tokenizer splits before it merges."""


class Source(Protocol):
    """Something that continues prompts greedily."""

    @property
    def origin(self) -> Origin:
        """What it is."""

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, ignore_eos: bool
    ) -> list[list[GoldenStep]]:
        """The steps after each prompt."""


def record(prompts: Sequence[Prompt], source: Source, engine: Engine, *, max_tokens: int, ignore_eos: bool) -> Golden:
    """A golden run of `source`; `engine` has the same model and says which it is."""
    steps = source.complete([prompt.token_ids for prompt in prompts], max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Golden(
        origin=source.origin,
        model=model_identity(engine),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        prompts=tuple(
            GoldenPrompt(prompt.text, prompt.token_ids, tuple(found))
            for prompt, found in zip(prompts, steps, strict=True)
        ),
    )


def model_identity(engine: Engine) -> ModelIdentity:
    """Which model and tokenizer an engine has."""
    model = engine.describe()["model"]
    return ModelIdentity(model["name"], model["fingerprint"], engine.vocab_size, tokenizer_fingerprint(engine))


def tokenizer_fingerprint(engine: Engine) -> str:
    """32 hex digits over the bytes of every token and the ids of a probe text."""
    digest = hashlib.blake2b(digest_size=16)
    for token_id in range(engine.vocab_size):
        data = engine.token_bytes(token_id)
        digest.update(len(data).to_bytes(4, "little") + data)
    digest.update(repr(engine.encode(_PROBE)).encode())
    return digest.hexdigest()


class EngineSource:
    """Our engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def origin(self) -> Origin:
        about = self._engine.describe()
        return Origin(
            engine="deltafold",
            engine_version=deltafold.__version__,
            torch=about["versions"]["torch"],
            dtype=about["dtype"],
            residual_dtype=about["residual_dtype"],
            backend=about["backend"],
            device=about["device"],
        )

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, ignore_eos: bool
    ) -> list[list[GoldenStep]]:
        """See `Source.complete`; all prompts share steps."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=ignore_eos, logprobs=NUM_TOP)
        completions = self._engine.complete_tokens(prompts, params)
        return [[golden_step(entry) for entry in completion.logprobs or ()] for completion in completions]


def golden_step(entry: TokenLogprob) -> GoldenStep:
    """A step of an engine's output as a golden run keeps it."""
    return GoldenStep(entry.token_id, entry.logprob, tuple((best.token_id, best.logprob) for best in entry.top))
