"""Golden steps from any OpenAI-compatible server: its completions endpoint, prompts as token ids, with logprobs.

Servers name tokens by their text. The model's own tokenizer turns it back into ids, and a text that two tokens share
is refused. `token_id:N` and `bytes:\\x..` (what servers write for tokens without a text) are understood.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltafold import Engine, GoldenError, OptionError
from deltafold.parity.golden import NUM_TOP, GoldenStep, Origin

if TYPE_CHECKING:
    import httpx

SECONDS_PER_REQUEST = 600.0

_AMBIGUOUS = -1


class ServerSource:
    """A server behind `base_url` (the part before `/completions`, with its `/v1`)."""

    def __init__(
        self,
        base_url: str,
        engine: Engine,
        *,
        served_model: str | None = None,
        api_key: str | None = None,
        client: httpx.Client | None = None,
    ) -> None:
        """`engine` has the tokenizer of the served model. `served_model` None takes the first the server lists.
        `client` replaces the HTTP client.

        Raises:
            OptionError: httpx is not installed.
            GoldenError: the server cannot be reached or lists no model.
        """
        try:
            import httpx
        except ImportError as error:
            raise OptionError("--engine openai needs the httpx package") from error
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.Client(timeout=SECONDS_PER_REQUEST)
        self._errors = (httpx.HTTPError, httpx.InvalidURL, ValueError)
        self._headers = headers
        self._url = base_url.rstrip("/")
        self._ids = _ids_by_text(engine)
        self._served_model = served_model or self._first_model()
        self.origin = Origin(
            engine="openai",
            engine_version=self._served_model,
            torch="unknown",
            dtype="unknown",
            residual_dtype="unknown",
            backend="unknown",
            device="unknown",
        )

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, ignore_eos: bool
    ) -> list[list[GoldenStep]]:
        """See `Source.complete`; one request a prompt. `ignore_eos` is sent only if true: not every server has it."""
        steps = []
        for i, prompt in enumerate(prompts):
            body = {
                "model": self._served_model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "logprobs": NUM_TOP,
            } | ({"ignore_eos": True} if ignore_eos else {})
            answer = self._call("POST", "/completions", body)
            try:
                logprobs = answer["choices"][0]["logprobs"]
                found = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise GoldenError(f"{self._url}: prompt {i}: the answer has no usable logprobs ({error!r})") from error
            steps.append([self._step(*entry, where=f"prompt {i}, token {n}") for n, entry in enumerate(found)])
        return steps

    def _step(self, text: str, logprob: float, top: Mapping[str, float], *, where: str) -> GoldenStep:
        chosen = self._token_id(text, where)
        pairs = sorted(((self._token_id(name, where), value) for name, value in top.items()), key=lambda pair: -pair[1])
        return GoldenStep(chosen, logprob, tuple(pairs[:NUM_TOP]))

    def _token_id(self, text: str, where: str) -> int:
        if match := re.fullmatch(r"token_id:(\d+)", text):
            return int(match[1])
        token_id = self._ids.get(text)
        if token_id is None or token_id == _AMBIGUOUS:
            kind = "no token" if token_id is None else "more than one token"
            raise GoldenError(f"{self._url}: {where}: {kind} of the model's tokenizer has the text {text!r}")
        return token_id

    def _first_model(self) -> str:
        answer = self._call("GET", "/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise GoldenError(f"{self._url}/models lists no model") from error

    def _call(self, method: str, path: str, body: object = None) -> Any:
        try:
            response = self._client.request(method, self._url + path, json=body, headers=self._headers)
            if response.is_error:
                raise GoldenError(f"{self._url}{path}: status {response.status_code}: {response.text:.300}")
            return response.json()
        except self._errors as error:
            raise GoldenError(f"{self._url}{path}: {error}") from error


def _ids_by_text(engine: Engine) -> dict[str, int]:
    """Token ids by the text a server shows for them; _AMBIGUOUS where several share it."""
    ids: dict[str, int] = {}
    for token_id in range(engine.vocab_size):
        data = engine.token_bytes(token_id)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        ids[text] = _AMBIGUOUS if text in ids else token_id
    return ids
