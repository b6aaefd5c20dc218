"""A short run of the load benchmark: 64 streams at once, some cut; the long one is `benchmarks/server_load.py`."""

from __future__ import annotations

import asyncio

from benchmarks.server_load import load
from benchmarks.sse_client import Target
from tests.server.conftest import API_KEY

NUM_STREAMS = 64


def test_64_streams_some_of_them_cut(server):
    run = load(Target(server.url, API_KEY), server.process.pid, num_streams=NUM_STREAMS, seconds=2, max_tokens=6)
    report = asyncio.run(run)
    assert report.problems == []
    assert report.num_whole + report.num_cut >= NUM_STREAMS
    assert report.num_whole > 0
    assert report.num_cut > 0
    assert report.most_running > NUM_STREAMS / 2
