"""What a streamed token costs the event loop, counted in calls: a throughput floor that no machine's load moves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.server.driving import CHAT, COMPLETIONS, Connection, until, user
from tests.server.fake_engine import FakeEngine

import deltafold.server
from deltafold.server.app import create_app

SERVER = str(Path(deltafold.server.__file__).parent)
MAX_CALLS = 12  # a token, of functions of the server and resumptions of its coroutines
BODIES = {COMPLETIONS: {"prompt": "hi", "max_tokens": 240}, CHAT: {"messages": user("hi"), "max_tokens": 240}}


def calls_a_token(path: str, num_tokens: int) -> float:
    num_calls = 0

    def count(frame, event, _):
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(SERVER)

    async def run() -> None:
        engine = FakeEngine(is_stepping=False, reply="x" * 240)
        connection = Connection(create_app(engine), path, {**BODIES[path], "stream": True})
        await until(lambda: engine.running)
        engine.step()  # the first token's costs are the call's
        await until(lambda: b'"x"' in connection.body)
        sys.setprofile(count)
        try:
            for num in range(num_tokens):
                engine.step()
                await until(lambda num=num: connection.body.count(b'"x"') == num + 2)
        finally:
            sys.setprofile(None)
        connection.disconnect()
        await connection.finish()

    asyncio.run(run())
    return num_calls / num_tokens


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_streamed_token_costs_few_calls(path):
    assert 0 < calls_a_token(path, 50) <= MAX_CALLS
