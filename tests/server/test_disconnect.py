"""Fault 13: a client that goes away frees its request before the engine's next step, wherever the call is."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from tests.server.driving import CHAT, COMPLETIONS, Connection, until, user
from tests.server.fake_engine import FakeEngine

from deltafold.server.app import create_app
from deltafold.server.middleware import CLIENT_CLOSED_REQUEST

BODIES = {COMPLETIONS: {"prompt": "hi", "max_tokens": 50}, CHAT: {"messages": user("hi")}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("is_stream", "num_steps"), [(True, 0), (True, 3), (False, 0), (False, 3)], ids=["first", "mid", "whole", "late"]
)
def test_a_disconnect_aborts_before_another_step(path, is_stream, num_steps):
    async def run() -> None:
        engine = FakeEngine(is_stepping=False)
        connection = Connection(create_app(engine), path, {**BODIES[path], "stream": is_stream, "n": 2})
        await until(lambda: len(engine.running) == 2)
        for _ in range(num_steps):
            engine.step()
            await asyncio.sleep(0)
        connection.disconnect()
        await connection.finish()
        assert engine.running == []
        assert engine.num_steps == num_steps
        assert engine.stats().num_free_state_slots == engine.stats().num_state_slots

    asyncio.run(run())


def test_every_prompt_of_a_stream_is_aborted():
    async def run() -> None:
        engine = FakeEngine(is_stepping=False)
        body = {"prompt": ["a", "b", "c"], "stream": True, "max_tokens": 50}
        connection = Connection(create_app(engine), COMPLETIONS, body)
        await until(lambda: len(engine.running) == 3)
        engine.step()
        await until(lambda: connection.body.count(b"data: ") == 3)
        connection.disconnect()
        await connection.finish()
        assert engine.running == []

    asyncio.run(run())


def test_a_client_that_stops_reading_and_leaves_is_noticed():
    class Stalled(Connection):
        async def _send(self, message):
            await super()._send(message)
            if message.get("body"):
                await asyncio.Event().wait()  # a full socket buffer

    async def run() -> None:
        engine = FakeEngine(is_stepping=False)
        connection = Stalled(create_app(engine), COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True})
        await until(lambda: engine.running)
        engine.step()
        await until(lambda: connection.body)
        connection.disconnect()
        await connection.finish()
        assert engine.running == []

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [True, False])
def test_who_stays_gets_everything_while_others_leave(is_stream):
    async def run() -> None:
        engine = FakeEngine(is_stepping=False)
        app = create_app(engine)
        body = {**BODIES[COMPLETIONS], "stream": is_stream}
        staying, leaving = Connection(app, COMPLETIONS, body), Connection(app, COMPLETIONS, body)
        await until(lambda: len(engine.running) == 2)
        leaving.disconnect()
        await leaving.finish()
        while engine.running:
            engine.step()
        await staying.finish()
        assert b"all." in staying.body or b'"."' in staying.body
        assert engine.aborted == [engine.aborted[0]]

    asyncio.run(run())


def outcome(caplog, is_stream: bool, end) -> tuple[str, int]:
    """What the logs say of a call that `end(engine, connection)` ends after its first token."""

    async def run() -> None:
        engine = FakeEngine(is_stepping=False)
        body = {**BODIES[COMPLETIONS], "stream": is_stream}
        connection = Connection(create_app(engine), COMPLETIONS, body)
        await until(lambda: engine.running)
        engine.step()
        await until(lambda: not is_stream or connection.body)
        end(engine, connection)
        await asyncio.wait([connection.task], timeout=20)
        assert connection.task.done()
        connection.task.exception()

    with caplog.at_level(logging.INFO, "deltafold.server"):
        asyncio.run(run())
    request, access = (json.loads(record.message) for record in caplog.records if "deltafold" in record.name)
    return request["outcome"], access["status"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_logs_tell_a_disconnect_from_a_defect(caplog, is_stream):
    status = 200 if is_stream else CLIENT_CLOSED_REQUEST
    assert outcome(caplog, is_stream, lambda _, connection: connection.disconnect()) == ("disconnected", status)
    caplog.clear()
    status = 200 if is_stream else 500
    assert outcome(caplog, is_stream, lambda engine, _: engine.fail(KeyError("x"))) == ("failed", status)
