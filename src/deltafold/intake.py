"""From what a caller passes to Requests: all that can be wrong with a request is found here, before it queues."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from deltafold.errors import ContextLengthError, InvalidTokenError, RequestError, UnsupportedOptionError
from deltafold.scheduler.request import Request
from deltafold.types import SamplingParams

_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1


class Intake:
    """Makes requests for one model. `seed` makes the seeds of requests that bring none reproducible.

    `foreign_token_ids` stand for input of a kind that is not supported, and say which.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        end_token_ids: frozenset[int],
        seed: int | None,
        foreign_token_ids: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._foreign_token_ids = foreign_token_ids
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._end_token_ids = end_token_ids
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()

    def make(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams, request_id: str | None = None
    ) -> list[Request]:
        """`params.n` requests a prompt, prompt-major; one id for all of them, a fresh one unless given.

        Raises:
            RequestError: InvalidTokenError for an id out of the vocabulary, UnsupportedOptionError for one that stands
                for an image, ContextLengthError for too many tokens.
        """
        if request_id is not None and (not isinstance(request_id, str) or not request_id or "/" in request_id):
            raise RequestError(f"request_id must be a non-empty string without '/', got {request_id!r}")
        self._check_params(params)
        checked = [self._check_prompt(prompt, params) for prompt in prompts]
        if not checked:
            raise RequestError("prompt must hold at least one prompt, got none", param="prompt")
        request_id = request_id or f"cmpl-{uuid.uuid4().hex}"
        requests: list[Request] = []
        for prompt in checked:
            seed = params.seed if params.seed is not None else self._random.getrandbits(63)
            leader: Request | None = None
            for choice in range(params.n):
                requests.append(
                    Request(
                        request_id=request_id,
                        index=len(requests),
                        prompt_token_ids=prompt,
                        params=params,
                        seed=(seed + choice * _SEED_STEP) & _SEED_MASK,
                        end_token_ids=self._end_token_ids,
                        max_total_tokens=min(
                            self._max_model_len, len(prompt) + (params.max_tokens or self._max_model_len)
                        ),
                        salt=params.cache_salt,
                        leader=leader,
                    )
                )
                leader = leader or requests[-1]
        return requests

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(params, name):
                self._check_id(token_id, name)

    def _check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
            raise RequestError(f"a prompt must be text or a list of token ids, got {prompt!r}", param="prompt")
        if not prompt:
            raise RequestError("the prompt is empty; at least 1 token is needed", param="prompt")
        for token_id in prompt:
            self._check_id(token_id, "prompt")
            if token_id in self._foreign_token_ids:
                kind = self._foreign_token_ids[token_id]
                raise UnsupportedOptionError(
                    f"prompt: token id {token_id} stands for {kind}, only text is supported", param="prompt"
                )
        limit = self._max_model_len
        if len(prompt) >= limit:
            message = f"the prompt has {len(prompt)} tokens, which leaves none of max_model_len {limit} for an answer"
            raise ContextLengthError(message, param="prompt")
        if params.max_tokens is not None and len(prompt) + params.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt's {len(prompt)} tokens and max_tokens {params.max_tokens} make "
                f"{len(prompt) + params.max_tokens}, and max_model_len is {limit}",
                param="max_tokens",
            )
        return tuple(prompt)

    def _check_id(self, token_id: object, param: str) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidTokenError(f"{param}: token ids must be integers, got {token_id!r}", param=param)
        if not 0 <= token_id < self._vocab_size:
            message = f"{param}: token id {token_id} is outside the vocabulary 0..{self._vocab_size - 1}"
            raise InvalidTokenError(message, param=param)
