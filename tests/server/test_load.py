"""A short run of the load benchmark: 64 streams at once, some cut; and what calls leave behind, counted.

The long run, which also judges the process's memory and fairness by the clock, is `benchmarks/server_load.py`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter

import pytest
from benchmarks.server_load import load
from benchmarks.sse_client import Target
from tests.server.conftest import API_KEY
from tests.server.driving import CHAT, COMPLETIONS, Connection, user

from deltafold import SamplingParams
from deltafold.server.app import create_app

NUM_STREAMS = 64
NUM_ROUNDS = 6


def test_64_streams_some_of_them_cut(server):
    run = load(Target(server.url, API_KEY), server.process.pid, num_streams=NUM_STREAMS, seconds=2, max_tokens=6)
    report = asyncio.run(run)
    assert report.problems == []
    assert report.num_whole + report.num_cut >= NUM_STREAMS
    assert report.num_whole > 0
    assert report.num_cut > 0
    assert report.most_running > NUM_STREAMS / 2


class CutAtFirstToken(Connection):
    """A client that goes away as soon as it has got something."""

    async def _send(self, message):
        await super()._send(message)
        if message.get("body"):
            self.disconnect()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_calls_leave_no_object_behind(path, engine, monkeypatch):
    """Whole, cut and refused calls, again and again: of no type are there more by one a round. The engine's thread may
    hold an object or two at the moment of counting; what calls leave behind comes with every round."""
    # Another test's server may have left its loggers on, and pytest keeps what they say.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    app = create_app(engine)
    prompt = {"messages": user("hi")} if path == CHAT else {"prompt": "hi"}
    prompt["temperature"] = 0  # the same tokens each round: texts of tokens are kept
    bodies = [
        {**prompt, "max_tokens": 6, "stream": False},
        {**prompt, "max_tokens": 6, "stream": True, "n": 2},
        {**prompt, "max_tokens": 6, "stream": True, "logprobs": True if path == CHAT else 1},
        {**prompt, "max_tokens": "six"},
    ]

    async def round_of_calls() -> None:
        connections = [Connection(app, path, body) for body in bodies]
        cut = CutAtFirstToken(app, path, {**prompt, "max_tokens": 500, "stream": True, "ignore_eos": True})
        for connection in [*connections, cut]:
            await connection.finish()
        await engine.acomplete([[1]], SamplingParams(max_tokens=1))  # behind it the cut one is freed

    async def run() -> None:
        before, after = Counter(), Counter()  # objects too
        for count in (before, after):
            for _ in range(NUM_ROUNDS):  # the first ones fill caches
                await round_of_calls()
            count.update(await settled_objects())
        assert before["_asyncio.Task"]  # they are seen at all
        assert {name: num for name, num in (after - before).items() if num >= NUM_ROUNDS} == {}

    asyncio.run(run())


async def settled_objects() -> list[str]:
    """The types of all objects that live, a name an object."""
    await asyncio.sleep(0)
    gc.collect()
    return [f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects()]
