"""What the routes of one server share: the engine, its name and metrics, and the calls in flight.

`calls.py` registers each call here, so that a drain that took too long can end them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

from starlette.exceptions import HTTPException

from deltafold import Engine
from deltafold.server.logprobs import TokenTexts
from deltafold.server.metrics import ServerMetrics
from deltafold.server.problems import RETRY_AFTER_SECONDS

_SHORT_TEXT = 4096  # characters; encoding this many takes less than handing them to a thread


class ServerState:
    """The parts of one server. `created` is in seconds since the epoch."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self.created = int(time.time())
        self.metrics = ServerMetrics(engine)
        self.texts = TokenTexts(engine)
        self.in_flight: set[str] = set()
        self.is_draining = False

    async def token_ids(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt; a long text is encoded beside the event loop."""
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) <= _SHORT_TEXT:
            return self.engine.encode(prompt)
        return await asyncio.to_thread(self.engine.encode, prompt)

    async def chat_token_ids(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of a chat, encoded beside the event loop if it is long.

        Raises:
            RequestError: the chat template refuses the messages.
        """
        encode = functools.partial(self.engine.chat_token_ids, messages, add_generation_prompt=add_generation_prompt)
        num_characters = sum(len(str(message.get("content"))) for message in messages)
        return encode() if num_characters <= _SHORT_TEXT else await asyncio.to_thread(encode)

    def refuse_if_draining(self) -> None:
        """Raises:
        HTTPException: 503, on a connection that was open when the server began to shut down.
        """
        if self.is_draining:
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"}
            raise HTTPException(503, "the server is shutting down", headers=headers)

    def begin_drain(self) -> None:
        """From now on new calls are refused and `/health` says so; those in flight go on."""
        self.is_draining = True

    def abort_in_flight(self) -> int:
        """End every call in flight with finish reason "abort"; how many engine requests that were."""
        return sum(self.engine.abort(request_id) for request_id in tuple(self.in_flight))
