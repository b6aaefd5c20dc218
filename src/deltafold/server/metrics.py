"""What `/metrics` shows: the engine's own counters, read at each scrape, and what only the server can time.

Every server has a registry of its own, so two in one process do not meet.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deltafold import Engine, EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The media type of `ServerMetrics.render()`."""

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _EngineCollector(Collector):
    """Turns one `EngineStats` into metrics, so that a scrape shows one instant."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        # without this, registering would ask a perhaps dying engine for its figures
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from _gauges(stats := self._engine.stats())
        yield from _counters(stats)
        yield GaugeMetricFamily("deltafold_engine_up", "1 while the engine's step loop runs.", self._engine.is_alive)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    used_blocks = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    used_slots = stats.num_state_slots - stats.num_free_state_slots - stats.num_cached_state_slots
    yield GaugeMetricFamily("deltafold_requests_running", "Requests being computed.", stats.num_running)
    yield GaugeMetricFamily("deltafold_requests_waiting", "Requests waiting for room.", stats.num_waiting)
    yield GaugeMetricFamily("deltafold_blocks_used", "Cache blocks of unfinished requests.", used_blocks)
    yield GaugeMetricFamily(
        "deltafold_blocks_cached", "Cache blocks kept for later prompts; taken when needed.", stats.num_cached_blocks
    )
    yield GaugeMetricFamily("deltafold_blocks_free", "Cache blocks free.", stats.num_free_blocks)
    yield GaugeMetricFamily("deltafold_state_slots_used", "State slots of running requests.", used_slots)
    yield GaugeMetricFamily(
        "deltafold_state_slots_cached", "State slots that hold snapshots for later prompts.",
        stats.num_cached_state_slots,
    )  # fmt: skip
    yield GaugeMetricFamily("deltafold_state_slots_free", "State slots free.", stats.num_free_state_slots)
    yield GaugeMetricFamily(
        "deltafold_snapshots", "State snapshots kept, in slots and in host memory.", stats.num_snapshots
    )
    yield GaugeMetricFamily("deltafold_host_bytes", "Host memory that holds saved state.", stats.num_host_bytes)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    yield CounterMetricFamily("deltafold_prompt_tokens", "Prompt tokens of requests.", stats.num_prompt_tokens)
    yield CounterMetricFamily("deltafold_output_tokens", "Tokens generated.", stats.num_output_tokens)
    yield CounterMetricFamily(
        "deltafold_prefix_cached_tokens", "Prompt tokens restored from the prefix cache.", stats.num_cached_tokens
    )
    yield CounterMetricFamily("deltafold_preemptions", "Requests put back to make room.", stats.num_preemptions)
    yield CounterMetricFamily(
        "deltafold_saved_preemptions", "Preemptions that kept the request's state.", stats.num_saved_preemptions
    )
    yield CounterMetricFamily("deltafold_steps", "Steps of the engine.", stats.num_steps)


class _TokenHistogram(Collector):
    """A histogram without labels or locks, because it counts every token; for one thread, the event loop's."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # of each bucket alone; the last has no bound
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bucket takes the values up to its bound."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, itertools.accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)


class ServerMetrics:
    """The metrics of one server over `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.http_requests = Counter(
            "deltafold_http_requests", "Answers by route and status; 499 is a client that went away.",
            ("route", "status"), registry=self._registry,
        )  # fmt: skip
        self.time_to_first_token = _TokenHistogram(
            "deltafold_time_to_first_token_seconds", "Arrival to first token, of streamed requests.", _TTFT_BUCKETS
        )
        self.inter_token = _TokenHistogram(
            "deltafold_inter_token_seconds", "Between one token and the next, of streamed requests.",
            _INTER_TOKEN_BUCKETS,
        )  # fmt: skip
        self._registry.register(self.time_to_first_token)
        self._registry.register(self.inter_token)
        self.request_seconds = Histogram(
            "deltafold_request_seconds", "Arrival to last byte, of completions and chats.",
            ("route",), buckets=_REQUEST_BUCKETS, registry=self._registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class TokenTimer:
    """Times the tokens of one streamed completion from `start` (seconds of `time.perf_counter`)."""

    __slots__ = ("_last", "_metrics", "_start", "first")

    def __init__(self, metrics: ServerMetrics, start: float) -> None:
        self._metrics = metrics
        self._start = start
        self._last = start
        self.first: float | None = None

    def tick(self, num_tokens: int) -> None:
        """Note that `num_tokens` have come; 0 is nothing."""
        if num_tokens == 0:
            return
        now = time.perf_counter()
        if self.first is None:
            self.first = now - self._start
            self._metrics.time_to_first_token.observe(self.first)
        else:
            self._metrics.inter_token.observe((now - self._last) / num_tokens)
        self._last = now
