"""Load on a server over loopback: many streams at once, some of them cut; fails on an error, a leak or unfairness.

Run it as a script: it starts `deltafold serve` with the built-in model. Figures go to docs/serving.md. What another
program on the machine can cause (a late stream, memory touched late) is told apart from what only the server can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.sse_client import StreamError, Target, metrics, stream

WORDS = Path(__file__).read_text().split()


@dataclass(slots=True)
class Worker:
    """One client: what it got."""

    num_tokens: int = 0
    num_cut: int = 0
    whole_seconds: list[float] = field(default_factory=list)  # of each completion that was not cut
    ttfts: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment: seconds since the start, its gauges and its process."""

    at: float
    running: float
    waiting: float
    slots_used: float
    blocks_used: float
    rss_bytes: int
    num_files: int


@dataclass(slots=True)
class Report:
    """What a run showed; `problems` is empty if all is well, so is `unsteady` after a long run on a quiet machine."""

    num_streams: int
    seconds: float
    num_tokens: int
    tokens_per_second: float
    num_whole: int
    num_cut: int
    whole_median_s: float  # a completion that was not cut, all of one length
    whole_slowest_s: float
    ttft_median_ms: float
    ttft_p99_ms: float
    rss_mib: list[float]
    num_files: list[int]
    most_running: float
    problems: list[str]  # errors, memory that is not free again, file handles
    unsteady: list[str]  # memory of the process that grew, streams that were served late


async def work(target: Target, worker: Worker, *, seed: int, max_tokens: int, until: float) -> None:
    """Streams one completion after another; every fourth is cut somewhere, before its first token or later."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        body = {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 24))), "max_tokens": max_tokens,
            "ignore_eos": True, "logprobs": 0,
        }  # fmt: skip
        cut = draw.randint(1, max_tokens // 2) if draw.random() < 0.25 else None
        start, first, num_tokens = time.monotonic(), None, 0
        try:
            async with aclosing(stream(target, body, num_events=cut)) as counts:
                async for count in counts:
                    num_tokens = count
                    first = first or time.monotonic() - start
        except (StreamError, OSError, asyncio.IncompleteReadError) as error:
            worker.errors.append(repr(error))
            return
        worker.ttfts.append(first or 0.0)
        worker.num_tokens += num_tokens
        if cut is None:
            worker.whole_seconds.append(time.monotonic() - start)
        else:
            worker.num_cut += 1


async def sample(target: Target, pid: int, start: float) -> Sample:
    """Asks the server and /proc."""
    found = await metrics(target)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Sample(
        time.monotonic() - start,
        found["deltafold_requests_running"],
        found["deltafold_requests_waiting"],
        found["deltafold_state_slots_used"],
        found["deltafold_blocks_used"],
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir(f"/proc/{pid}/fd")),
    )


async def wait_until_idle(target: Target, pid: int, patience: float) -> Sample:
    """The first sample without a used slot, or the last one within `patience` seconds."""
    start = time.monotonic()
    while True:
        found = await sample(target, pid, start)
        if (found.slots_used == 0 and found.waiting == 0) or found.at > patience:
            return found
        await asyncio.sleep(0.05)


async def load(
    target: Target, pid: int, *, num_streams: int, seconds: float, max_tokens: int, max_rss_growth: int = 64 * 2**20
) -> Report:
    """Keeps `num_streams` streams going for `seconds`, then lets them end.

    Args:
        pid: of the server's process, on this machine.
        max_rss_growth: most bytes that the process may gain between the first third of the run and its end.
    """
    before = await sample(target, pid, time.monotonic())
    start = time.monotonic()
    workers = [Worker() for _ in range(num_streams)]
    tasks = [
        asyncio.ensure_future(work(target, worker, seed=seed, max_tokens=max_tokens, until=start + seconds))
        for seed, worker in enumerate(workers)
    ]
    samples = []
    while not all(task.done() for task in tasks):
        samples.append(await sample(target, pid, start))
        await asyncio.wait(tasks, timeout=min(1.0, seconds / 10))
    await asyncio.gather(*tasks)
    elapsed = time.monotonic() - start
    after = await wait_until_idle(target, pid, patience=10)
    return _report(before, samples, after, workers, elapsed, max_rss_growth)


def _report(
    before: Sample, samples: Sequence[Sample], after: Sample, workers: Sequence[Worker], elapsed: float, growth: int
) -> Report:
    whole = sorted(seconds for worker in workers for seconds in worker.whole_seconds)
    num_tokens = sum(worker.num_tokens for worker in workers)
    ttfts = sorted(ttft for worker in workers for ttft in worker.ttfts)
    settled = max(found.rss_bytes for found in samples[: max(1, len(samples) // 3)])
    problems = [error for worker in workers for error in worker.errors]
    if after.slots_used or after.blocks_used or after.running or after.waiting:
        problems.append(f"not everything was freed: {after}")
    if after.num_files > before.num_files:
        problems.append(f"file handles grew from {before.num_files} to {after.num_files}")
    unsteady = []
    if after.rss_bytes - settled > growth:
        unsteady.append(f"RSS grew from {settled} to {after.rss_bytes} bytes, at most {growth} more are allowed")
    if whole and whole[-1] > 3 * whole[len(whole) // 2]:
        unsteady.append(f"not fair: a completion took {whole[-1]:.1f} s, half of them {whole[len(whole) // 2]:.1f} s")
    return Report(
        num_streams=len(workers),
        seconds=round(elapsed, 1),
        num_tokens=num_tokens,
        tokens_per_second=round(num_tokens / elapsed, 1),
        num_whole=len(whole),
        num_cut=sum(worker.num_cut for worker in workers),
        whole_median_s=round(whole[len(whole) // 2], 2) if whole else 0.0,
        whole_slowest_s=round(whole[-1], 2) if whole else 0.0,
        ttft_median_ms=round(1000 * ttfts[len(ttfts) // 2], 1) if ttfts else 0.0,
        ttft_p99_ms=round(1000 * ttfts[len(ttfts) * 99 // 100], 1) if ttfts else 0.0,
        rss_mib=[
            round(found.rss_bytes / 2**20, 1) for found in (before, *samples[:: max(1, len(samples) // 6)], after)
        ],
        num_files=[before.num_files, max(found.num_files for found in samples), after.num_files],
        most_running=max(found.running for found in samples),
        problems=problems,
        unsteady=unsteady,
    )


def main() -> int:
    """Starts the server, loads it, prints the report as JSON; 1 if it has problems."""
    parser = argparse.ArgumentParser(description="Load a server with streams and look for errors, leaks, unfairness.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments, serve_arguments = parser.parse_known_args()
    command = [sys.executable, "-m", "deltafold.cli", "serve", "--port", "0", *serve_arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r" at (http://\S+) ", line)))
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        target = Target(url)
        run = load(
            target, server.pid, num_streams=arguments.streams, seconds=arguments.seconds,
            max_tokens=arguments.max_tokens,
        )  # fmt: skip
        report = asyncio.run(run)
        server.terminate()
        if server.wait(30) != 0:
            report.problems.append(f"the server ended with status {server.returncode}")
        drain.wait()
    print(json.dumps(asdict(report), indent=2))
    return 1 if report.problems or report.unsteady else 0


if __name__ == "__main__":
    raise SystemExit(main())
