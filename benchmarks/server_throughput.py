"""Output tokens a second through the server against the engine alone: same engine, same prompts, turn by turn.

The server runs in this process over the engine that is measured alone; its client is a process of its own. CPU time is
there because it hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from deltafold import Engine, SamplingParams
from deltafold.server.app import create_app

FLOOR = 0.9
"""The least that the server may reach of the engine's own tokens a second."""

WORDS = Path(__file__).read_text().split()


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement: output tokens a second, and the CPU time of the engine's process, in ms a token."""

    rate: float
    cpu_ms: float


def prompts(num: int) -> list[str]:
    """`num` prompts of 12 to 40 words, the same ones every time."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(12, 40))) for _ in range(num)]


def measure(answer: Callable[[], float], num_tokens: int) -> Speed:
    """Speed of `answer`, which generates `num_tokens` and says how many seconds that took."""
    cpu_start = time.process_time()
    seconds = answer()
    return Speed(num_tokens / seconds, 1000 * (time.process_time() - cpu_start) / num_tokens)


def answer_alone(engine: Engine, texts: Sequence[str], max_tokens: int) -> float:
    """Seconds that the engine takes for all prompts at once, without a server."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    start = time.perf_counter()
    engine.complete(texts, params)
    return time.perf_counter() - start


def answer_through(url: str, texts: Sequence[str], max_tokens: int) -> float:
    """Seconds that a client of `url` sees, one stream a prompt."""
    bodies = [{"prompt": text, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} for text in texts]
    command = [sys.executable, str(Path(__file__).with_name("sse_client.py")), url]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, input=json.dumps(bodies)).stdout)


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


def main() -> int:
    """Prints both speeds and their ratio as JSON; 1 if the ratio of tokens a second is below the floor."""
    parser = argparse.ArgumentParser(description="Compare the server's throughput with the engine's own.")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts, max_tokens = prompts(arguments.streams), arguments.max_tokens
    num_tokens = len(texts) * max_tokens
    alone, through = [], []
    with Engine.load(arguments.model, device=arguments.device, prefix_cache=False) as engine, served(engine) as url:
        for _ in range(arguments.rounds + 1):
            alone.append(measure(partial(answer_alone, engine, texts, max_tokens), num_tokens))
            through.append(measure(partial(answer_through, url, texts, max_tokens), num_tokens))
    figures = summary(alone[1:], through[1:])  # the first round warms up
    print(json.dumps({"streams": arguments.streams, "max_tokens": max_tokens, **figures}, indent=2))
    return exit_status(figures)


def exit_status(figures: dict[str, Any]) -> int:
    """0 if the server is fast enough."""
    return 0 if figures["median_ratio"] >= FLOOR else 1


def summary(alone: Sequence[Speed], through: Sequence[Speed]) -> dict[str, Any]:
    """Both speeds of every round, and the median of their ratios: above 1 the server is the faster one."""
    pairs = list(zip(alone, through, strict=True))
    return {
        "engine_tokens_per_second": [round(speed.rate, 1) for speed in alone],
        "server_tokens_per_second": [round(speed.rate, 1) for speed in through],
        "median_ratio": round(statistics.median(server.rate / engine.rate for engine, server in pairs), 3),
        "engine_cpu_ms_per_token": [round(speed.cpu_ms, 2) for speed in alone],
        "server_cpu_ms_per_token": [round(speed.cpu_ms, 2) for speed in through],
        "median_cpu_ratio": round(statistics.median(engine.cpu_ms / server.cpu_ms for engine, server in pairs), 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
