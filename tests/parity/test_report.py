"""The reports: what the text says, JSON that any reader takes, and a page that fetches nothing."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from tests.checkpoints import random_prompt
from tests.parity.goldens_of import NUM_STEPS, tiny_golden, with_step

from deltafold import Engine
from deltafold.parity.compare import Comparison, compare
from deltafold.parity.following import Finding, LayerError
from deltafold.parity.golden import GoldenStep
from deltafold.parity.page import html_page, margin_histogram
from deltafold.parity.plots import Line, bars, grid, log_dots, log_lines
from deltafold.parity.report import json_report, text_report
from deltafold.parity.trace import Trace, trace

FINDING = Finding(2, 5, "mla_decode", "output", "0", math.inf, 1e-5)
TRACE = Trace(70, 3, 900, 1e-5, (LayerError(0, 1e-7, 2e-7), LayerError(1, math.inf, 0.0)), (FINDING,))


@pytest.fixture(scope="module")
def comparison(engine: Engine) -> Comparison:
    """A run whose second prompt has a mismatch at its fifth position."""

    def swap(step: GoldenStep) -> GoldenStep:
        (_, best), *others, (last, _) = step.top
        return GoldenStep(last, best, ((last, best), *others, (step.token_id, step.top[-1][1])))

    return compare(with_step(tiny_golden(engine), 1, 4, swap), engine)


def test_text_names_the_position_and_both_sides(comparison: Comparison) -> None:
    text = text_report(comparison, TRACE)
    assert re.search(r"^verdict +mismatch$", text, re.M)
    assert re.search(r"^prompts +1 identical, 0 near_tie, 1 mismatch$", text, re.M)
    assert re.search(r"^prompt 1 +mismatch +first divergence 4$", text, re.M)
    golden, ours = comparison.prompts[1].decode[4].golden_token, comparison.prompts[1].decode[4].our_token
    assert re.search(rf"^  decode +4 mismatch  golden {golden} ours {ours} rank \d+, margin golden", text, re.M)
    assert "tie 0.001, drift 0.0004, kl 1e-06 nats (both sides compute in float32)" in text
    assert "layer 5, op mla_decode, output '0' in decode step 2: relative error inf, tolerance 1e-05" in text


def test_json_has_every_position_and_no_infinity(comparison: Comparison) -> None:
    report = json.loads(json.dumps(json_report(comparison, TRACE), allow_nan=False))
    assert report["verdict"] == "mismatch"
    assert report["counts"] == {"identical": 1, "near_tie": 0, "mismatch": 1}
    assert [len(prompt["prefill"]) for prompt in report["prompts"]] == [NUM_STEPS, NUM_STEPS]
    assert len(report["prompts"][1]["decode"]) == 5
    assert report["trace"]["findings"][0]["error"] is None
    assert report["tolerance"]["tie"] == 1e-3


def test_page_is_self_contained_and_its_plots_are_well_formed(comparison: Comparison) -> None:
    page = html_page(comparison, TRACE)
    assert "<script" not in page
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", page)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}
    plots = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(plots) == 4
    for plot in plots:
        ElementTree.fromstring(plot)
    assert page.count("#c03030") >= 2
    assert len(html_page(comparison, None)) < len(page)


def test_page_escapes_what_it_shows(comparison: Comparison) -> None:
    model = replace(comparison.model, name="<b>&")
    page = html_page(replace(comparison, model=model), None)
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page


def test_histogram_counts_every_forced_position(comparison: Comparison) -> None:
    counts = [int(n) for n in re.findall(r", all: (\d+)<", margin_histogram(comparison))]
    assert sum(counts) == 2 * NUM_STEPS
    parted = [int(n) for n in re.findall(r", tokens part: (\d+)<", margin_histogram(comparison))]
    assert sum(parted) == sum(p.our_token != p.golden_token for q in comparison.prompts for p in q.prefill) > 0


def heights(svg: str, tip: str) -> list[float]:
    return [float(h) for h in re.findall(rf'height="([\d.]+)" fill="[^"]+"><title>[^<]*{tip}', svg)]


def test_bars_are_as_high_as_their_values() -> None:
    low, high = heights(bars("t", ["a", "b"], [Line("n", [1, 4])]), ", n: ")
    assert high == pytest.approx(4 * low, rel=0.01)


def test_lines_rise_with_their_values_and_infinity_is_at_the_top() -> None:
    svg = log_lines("t", ["0", "1", "2"], [Line("n", [1e-3, 1e-1, math.inf])], limit=1e-2)
    ys = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg)]
    assert ys[0] > ys[1] >= ys[2]
    assert "stroke-dasharray" in svg


def test_dots_stand_by_their_values_in_the_row_of_their_label() -> None:
    svg = log_dots("t", ["first", "<second>"], [Line("n", [1e-3, 1e-1]), Line("m", [0.0, math.inf])])
    dots = {
        tip: (float(x), float(y))
        for x, y, tip in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^<]*)', svg)
    }
    low, high = dots["first, n: 1.00e-03"], dots["&lt;second&gt;, n: 1.00e-01"]
    assert low[0] < high[0]
    assert low[1] < high[1]
    assert dots["first, m: 0.00e+00"] == low  # 1e-3 is where the axis starts
    assert dots["&lt;second&gt;, m: inf"][0] >= high[0]
    ticks = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*>1e-[123]<', svg)]
    assert ticks[1] - ticks[0] == pytest.approx(ticks[2] - ticks[1], abs=0.2)


def test_grid_has_one_cell_for_each_entry() -> None:
    svg = grid("t", ["a", "b"], [[("#111111", "x")] * 3, [("#222222", "y")]], [("#111111", "dark")])
    assert (svg.count("<title>x</title>"), svg.count("<title>y</title>")) == (3, 1)


def test_plots_of_nothing_are_well_formed(engine: Engine) -> None:
    for svg in (bars("t", [], []), grid("t", [], [], []), log_lines("t", [], [], limit=None), log_dots("t", [], [])):
        ElementTree.fromstring(svg)
    assert "no tensor left tolerance" in text_report(
        compare(tiny_golden(engine, num_steps=1), engine), trace(engine, random_prompt(0, 3), 1)
    )
