"""The verdict of the throughput benchmark; what a token costs is counted in test_cost.py."""

from __future__ import annotations

import pytest
from benchmarks.server_throughput import Speed, exit_status, summary


@pytest.mark.parametrize(("rates", "ratio", "status"), [((90, 200, 30), 0.9, 0), ((89, 200, 30), 0.89, 1)])
def test_a_server_below_nine_tenths_of_the_engine_fails(rates, ratio, status):
    alone = [Speed(100, 3.0), Speed(200, 3.0), Speed(100, 3.0)]
    figures = summary(alone, [Speed(rate, 4.0) for rate in rates])
    assert figures["median_ratio"] == ratio
    assert figures["median_cpu_ratio"] == 0.75
    assert exit_status(figures) == status
