"""A server in a process of its own, as users start it; and one over the fake engine, run as a script."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

REAL = (sys.executable, "-m", "deltafold.cli", "serve", "--device", "cpu")
FAKE = (sys.executable, "-m", "tests.server.serving")
PATIENCE_SECONDS = 120


class ServerProcess:
    """A running server; `log` has the lines it wrote to stderr so far."""

    def __init__(self, *arguments: str, command: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*(command or REAL), "--port", "0", *arguments], stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self._has_url = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._has_url.wait(PATIENCE_SECONDS) or not self.url:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.log))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r" at (http://\S+) ", line):
                self.url = found[1]
                self._has_url.set()
        self._has_url.set()

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(PATIENCE_SECONDS)
        self._reader.join()
        return status

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    import argparse
    import asyncio

    from tests.server.fake_engine import FakeEngine

    from deltafold.server.run import add_arguments, serve

    class Paced(FakeEngine):
        """Steps every 20 ms, so that a drain has something to wait for."""

        async def _step_on(self) -> None:
            while self.running:
                self.step()
                await asyncio.sleep(0.02)

    parser = argparse.ArgumentParser()
    parser.add_argument("--reply", default="0123456789" * 2)
    parser.add_argument("--max-model-len", type=int, default=256)
    add_arguments(parser)
    arguments = vars(parser.parse_args())
    engine = Paced(reply=arguments.pop("reply"), max_model_len=arguments.pop("max_model_len"))
    serve(engine, **arguments)


if __name__ == "__main__":
    main()
