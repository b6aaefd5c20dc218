"""A client that reads slower than the engine generates: nothing is lost, nothing is held but its own tokens."""

from __future__ import annotations

import asyncio

from tests.server.driving import COMPLETIONS, Connection, events, until
from tests.server.fake_engine import FakeEngine

from deltafold.server.app import create_app
from deltafold.server.calls import MAX_EVENTS

REPLY = "abcdefghij" * 20


class Slow(Connection):
    """After the first piece of the body, takes the next one only once `reads` is set: a full socket buffer."""

    def __init__(self, *arguments) -> None:
        self.reads = asyncio.Event()
        super().__init__(*arguments)

    async def _send(self, message):
        await super()._send(message)
        if message.get("body"):
            await self.reads.wait()


async def stalled(num_tokens: int) -> tuple[FakeEngine, Slow]:
    """An engine that has generated all tokens, and a client that has read the first."""
    engine = FakeEngine(is_stepping=False, reply=REPLY)
    body = {"prompt": "hi", "stream": True, "max_tokens": num_tokens}
    connection = Slow(create_app(engine), COMPLETIONS, body)
    await until(lambda: engine.running)
    engine.step()
    await until(lambda: connection.body)
    while engine.running:
        engine.step()
    return engine, connection


def pieces(connection: Connection) -> list[list]:
    """The events of each piece of the body."""
    bodies = [message["body"] for message in connection.sent if message.get("body")]
    return [events(body.decode()) for body in bodies]


def test_what_waited_is_written_in_one_piece_with_an_event_a_token():
    async def run() -> list[list]:
        _, connection = await stalled(20)
        connection.reads.set()
        await connection.finish()
        return pieces(connection)

    first, rest, done = asyncio.run(run())
    assert (len(first), len(rest), done) == (1, 19, ["[DONE]"])
    assert "".join(event["choices"][0]["text"] for event in first + rest) == REPLY[:20]
    assert [event["choices"][0]["finish_reason"] for event in rest] == [None] * 18 + ["length"]


def test_what_waits_is_encoded_a_bounded_number_of_events_at_a_time():
    async def run() -> list[list]:
        _, connection = await stalled(200)
        connection.reads.set()
        await connection.finish()
        return pieces(connection)

    found = asyncio.run(run())
    assert [len(piece) for piece in found] == [1, MAX_EVENTS, MAX_EVENTS, MAX_EVENTS, 7, 1]
    assert "".join(event["choices"][0]["text"] for piece in found[:-1] for event in piece) == REPLY


def test_who_stops_reading_holds_no_slot_once_all_is_generated():
    async def run() -> None:
        engine, connection = await stalled(200)
        assert engine.stats().num_free_state_slots == engine.stats().num_state_slots
        assert len(pieces(connection)) == 1
        connection.disconnect()
        await connection.finish()

    asyncio.run(run())
