"""Golden steps from the `transformers` package: its own model class, cache and kernels, none of ours.

`transformers` is a test dependency and imported here only, when it is asked for.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from deltafold import LoadError, OptionError
from deltafold.parity.golden import NUM_TOP, GoldenStep, Origin

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TransformersSource:
    """A causal language model of `transformers`, greedy, with its cache."""

    def __init__(self, model: str, *, dtype: str = "float32", device: str = "cpu", revision: str | None = None) -> None:
        """`model` is "builtin", a folder or a hub id.

        Raises:
            OptionError: `transformers` is not installed, or the dtype is not one of float32 and bfloat16.
            LoadError: it cannot load the model.
        """
        try:
            import transformers
        except ImportError as error:
            raise OptionError("--engine transformers needs the transformers package") from error
        if dtype not in DTYPES:
            raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        folder = str(files("deltafold") / "builtin") if model == "builtin" else model
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=DTYPES[dtype], revision=revision or "main"
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise LoadError(f"transformers cannot load {model!r}: {error}") from error
        self._model: Any = loaded.to(device).eval()
        self._cache_class: Any = transformers.DynamicCache
        parameters = inspect.signature(loaded.forward).parameters
        # Kimi-Linear's class has a name of its own for it.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._device = device
        self.origin = Origin(
            engine="transformers",
            engine_version=transformers.__version__,
            torch=torch.__version__,
            dtype=dtype,
            residual_dtype=dtype,
            backend=type(loaded).__name__,
            device=device,
        )

    @torch.inference_mode()
    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, ignore_eos: bool
    ) -> list[list[GoldenStep]]:
        """See `Source.complete`; prompts of equal length share a batch, so that nothing is padded."""
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for i, prompt in enumerate(prompts):
            by_length[len(prompt)].append(i)
        ends = frozenset() if ignore_eos else self._end_token_ids()
        steps: list[list[GoldenStep]] = [[] for _ in prompts]
        for group in by_length.values():
            found = self._batch(torch.tensor([list(prompts[i]) for i in group], device=self._device), max_tokens)
            for i, row in zip(group, found, strict=True):
                stop = next((n + 1 for n, step in enumerate(row) if step.token_id in ends), max_tokens)
                steps[i] = row[:stop]
        return steps

    def _batch(self, token_ids: Tensor, max_tokens: int) -> list[list[GoldenStep]]:
        cache = self._cache_class(config=self._model.config)
        steps: list[list[GoldenStep]] = [[] for _ in range(token_ids.shape[0])]
        for _ in range(max_tokens):
            output = self._model(token_ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
            logits = output.logits[:, -1].float()
            token_ids = logits.argmax(dim=-1, keepdim=True)
            for row, chosen, kept in zip(logits, token_ids[:, 0].tolist(), steps, strict=True):
                kept.append(_step(row, chosen))
        return steps

    def _end_token_ids(self) -> frozenset[int]:
        ends = self._model.generation_config.eos_token_id
        return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)


def _step(logits: Tensor, chosen: int) -> GoldenStep:
    """The step of one row of logits [vocab], of which `chosen` is the largest."""
    values, ids = torch.log_softmax(logits.double(), dim=-1).topk(min(NUM_TOP, logits.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return GoldenStep(chosen, dict(top)[chosen], top)
