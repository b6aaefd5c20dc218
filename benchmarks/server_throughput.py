"""Output tokens a second through the server against the engine alone: same engine, same prompts, turn by turn.

The server runs in this process over the engine that is measured alone; its client is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).parent.parent))

import uvicorn
from benchmarks.sse_client import Target, stream

from deltafold import Engine, SamplingParams
from deltafold.server.app import create_app

WORDS = Path(__file__).read_text().split()


def prompts(num: int) -> list[str]:
    """`num` prompts of 12 to 40 words, the same ones every time."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(12, 40))) for _ in range(num)]


def measure_engine(engine: Engine, texts: Sequence[str], num_tokens: int) -> float:
    """Output tokens a second of all prompts at once, without a server."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    start = time.perf_counter()
    engine.complete(texts, params)
    return len(texts) * num_tokens / (time.perf_counter() - start)


async def measure_server(url: str, texts: Sequence[str], num_tokens: int) -> float:
    """The same through `url`, one stream a prompt."""

    async def consume(text: str) -> int:
        body = {"prompt": text, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        async for _ in stream(Target(url), {**body, "stream_options": {"include_usage": True}}):
            pass
        return num_tokens

    start = time.perf_counter()
    total = sum(await asyncio.gather(*[consume(text) for text in texts]))
    return total / (time.perf_counter() - start)


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """The URL of a server over `engine` in a thread."""
    config = uvicorn.Config(create_app(engine), port=0, log_level="warning", access_log=False, ws="none")
    listener = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def client_process(url: str, num_streams: int, num_tokens: int) -> float:
    """`measure_server` in a process of its own."""
    command = [sys.executable, __file__, "--url", url, "--streams", str(num_streams), "--max-tokens", str(num_tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Prints both throughputs and their ratio as JSON; 1 if the ratio is below 0.9."""
    parser = argparse.ArgumentParser(description="Compare the server's throughput with the engine's own.")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    texts, num_tokens = prompts(arguments.streams), arguments.max_tokens
    if arguments.url is not None:
        print(asyncio.run(measure_server(arguments.url, texts, num_tokens)))
        return 0
    alone, through = [], []
    with Engine.load(arguments.model, device=arguments.device, prefix_cache=False) as engine, served(engine) as url:
        measure_engine(engine, texts, num_tokens)
        client_process(url, arguments.streams, num_tokens)
        for _ in range(arguments.rounds):
            alone.append(measure_engine(engine, texts, num_tokens))
            through.append(client_process(url, arguments.streams, num_tokens))
    ratios = [server / engine_alone for server, engine_alone in zip(through, alone, strict=True)]
    ratio = statistics.median(ratios)
    figures = {
        "streams": arguments.streams,
        "engine_tokens_per_second": [round(rate, 1) for rate in alone],
        "server_tokens_per_second": [round(rate, 1) for rate in through],
        "median_ratio": round(ratio, 3),
    }
    print(json.dumps(figures, indent=2))
    return 0 if ratio >= 0.9 else 1


if __name__ == "__main__":
    raise SystemExit(main())
