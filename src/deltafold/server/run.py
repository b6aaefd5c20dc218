"""Runs the server on a socket: `serve` until a signal, `add_arguments` for its command line.

At SIGTERM or SIGINT no new work is taken; calls in flight go on for `drain_seconds` and are then aborted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.config
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import uvicorn

from deltafold import Engine, OptionError
from deltafold.server.app import DEFAULT_MAX_BODY_BYTES, create_app
from deltafold.server.state import ServerState

API_KEY_VARIABLE = "DELTAFOLD_API_KEY"
"""Environment variable that brings the key without showing it in the list of processes."""

_ABORT_SECONDS = 5  # for aborted calls to send their last bytes before their tasks are cancelled

log = logging.getLogger("deltafold.server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's own options to `parser`; their names are `serve`'s keyword arguments."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get(API_KEY_VARIABLE),
        help=f"bearer key that clients must bring (default: the variable {API_KEY_VARIABLE})",
    )  # fmt: skip
    parser.add_argument(
        "--cors-origin", dest="cors_origins", action="append", default=[], metavar="ORIGIN",
        help="let pages of this origin call from a browser; repeatable, '*' is any (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S",
        help="how long calls in flight may go on after SIGTERM (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--max-body-bytes", type=int, default=DEFAULT_MAX_BODY_BYTES, metavar="N",
        help="largest request body taken (default: %(default)s)",
    )  # fmt: skip


class _Server(uvicorn.Server):
    """A uvicorn server that tells the application when the drain begins and when it has taken too long."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_seconds: float) -> None:
        super().__init__(config)
        self._state = state
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.begin_drain()
        log.info(
            "draining: %d engine requests in flight, at most %g s", len(self._state.in_flight), self._drain_seconds
        )
        limit = asyncio.get_running_loop().call_later(self._drain_seconds, self._end_drain)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    def _end_drain(self) -> None:
        log.warning("drain limit of %g s reached: aborted %d", self._drain_seconds, self._state.abort_in_flight())


def serve(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    drain_seconds: float = 30.0,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve `engine` until SIGTERM or SIGINT, then drain and return. The caller closes the engine.

    Args:
        host, port: where to listen; port 0 takes a free one.
        drain_seconds: how long calls in flight may go on after the signal before they are aborted.
        on_listening: called with the server's URL once it accepts connections; None prints it.

    The other arguments are `create_app`'s.

    Raises:
        OptionError: an argument is wrong, or the address cannot be listened on.
    """
    if not drain_seconds >= 0:
        raise OptionError(f"drain_seconds must be >= 0, got {drain_seconds}")
    app = create_app(
        engine,
        served_model_name=served_model_name,
        api_key=api_key,
        cors_origins=cors_origins,
        max_body_bytes=max_body_bytes,
    )
    _configure_logging()
    listener = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=int(drain_seconds) + _ABORT_SECONDS,
    )  # fmt: skip
    server = _Server(config, app.state.server, drain_seconds)
    announce = on_listening or _announce(app.state.server.model_name)
    with _signals_return(), listener:
        # connections queue in the socket from here on, so whoever reads the URL may connect at once
        announce(url)
        server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise OptionError(f"port must be in [0, 65535], got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OptionError(f"cannot listen on {host!r}, port {port}: {error}") from error


def _announce(model_name: str) -> Callable[[str], None]:
    def announce(url: str) -> None:
        print(f"deltafold serves {model_name!r} at {url} (chat page: {url}/)", file=sys.stderr, flush=True)

    return announce


@contextmanager
def _signals_return() -> Generator[None, None, None]:
    # uvicorn raises the signal again once it has drained; the process is to end by returning, not by the signal
    names = (signal.SIGTERM, signal.SIGINT)
    before = {name: signal.signal(name, lambda *_: None) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _configure_logging() -> None:
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
                "json": {"format": "%(message)s"},
            },
            "handlers": {
                "line": {"class": "logging.StreamHandler", "formatter": "line"},
                "json": {"class": "logging.StreamHandler", "formatter": "json"},
            },
            "loggers": {
                "deltafold.server": {"handlers": ["line"], "level": "INFO", "propagate": False},
                "deltafold.server.access": {"handlers": ["json"], "level": "INFO", "propagate": False},
                "deltafold.server.request": {"handlers": ["json"], "level": "INFO", "propagate": False},
                "uvicorn": {"handlers": ["line"], "level": "WARNING", "propagate": False},
            },
        }
    )
