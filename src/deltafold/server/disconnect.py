"""Work that ends with its client: `unless_disconnected` runs it beside a watch on the ASGI receive channel.

Cancelling the work is what aborts its requests in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled as soon as the client is gone.

    The request's body must have been read: whatever `receive` still brings is dropped.

    Raises:
        ClientDisconnect: the client went first; `work` has ended by then.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watch.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
