"""A comparison as one HTML page with plots: nothing is fetched, no script runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deltafold.parity.compare import Comparison, PromptComparison
from deltafold.parity.plots import Line, bars, grid, log_lines
from deltafold.parity.report import text_report
from deltafold.parity.trace import Trace
from deltafold.parity.verdict import Position, Verdict

COLOURS = {Verdict.IDENTICAL: "#a8cfa0", Verdict.NEAR_TIE: "#e8c050", Verdict.MISMATCH: "#c03030"}
UNREACHED = "#eeeeee"
MARGIN_EDGES = (1e-3, 1e-2, 1e-1, 0.5, 1.0, 2.0, 5.0)
"""Bins of the margin histogram, nats."""

_STYLE = (
    "body{font-family:sans-serif;max-width:720px;margin:2em auto;color:#333;padding:0 1em}"
    "pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:12px}svg{display:block;margin:1em 0;max-width:100%}"
)


def html_page(comparison: Comparison, trace: Trace | None) -> str:
    """The page: verdict, plots, and the text report whole."""
    plots = [margin_histogram(comparison), divergence_timeline(comparison), drift_plot(comparison)]
    if trace is not None:
        plots.append(layer_plot(trace))
    title = f"deltafold parity: {comparison.verdict}"
    colour = COLOURS[comparison.verdict]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>Parity: <span style="border-bottom:4px solid {colour}">{escape(comparison.verdict)}</span></h1>'
        f"{''.join(plots)}<pre>{escape(text_report(comparison, trace))}</pre></body></html>\n"
    )


def margin_histogram(comparison: Comparison) -> str:
    """How sure the golden run was: at all forced positions, and at those where the tokens part."""
    labels = [f"<{edge:g}" for edge in MARGIN_EDGES] + [f">={MARGIN_EDGES[-1]:g}"]
    forced = [position for prompt in comparison.prompts for position in prompt.prefill]
    parted = [position for position in forced if position.our_token != position.golden_token]
    groups = [Line("all", _histogram(forced)), Line("tokens part", _histogram(parted))]
    return bars("Margin of the golden run (nats), positions", labels, groups)


def divergence_timeline(comparison: Comparison) -> str:
    """Every position of every prompt on both paths, coloured by verdict."""
    rows, cells = [], []
    for prompt in comparison.prompts:
        length = max(len(prompt.prefill), len(prompt.decode))
        for path, positions in (("decode", prompt.decode), ("prefill", prompt.prefill)):
            rows.append(f"{prompt.index} {path}")
            cells.append([_cell(position) for position in positions])
            cells[-1] += [(UNREACHED, "not reached")] * (length - len(positions))
    legend = [(colour, str(verdict)) for verdict, colour in COLOURS.items()] + [(UNREACHED, "not reached")]
    return grid("Verdict by position", rows, cells, legend)


def drift_plot(comparison: Comparison) -> str:
    """Each prompt's largest difference of a likely token's logprob."""
    lines = [
        Line("decode", [_largest_drift(prompt.decode) for prompt in comparison.prompts]),
        Line("prefill", [_largest_drift(prompt.prefill) for prompt in comparison.prompts]),
    ]
    labels = _sparse_labels(comparison.prompts)
    title = "Largest drift of a likely token by prompt (nats)"
    return log_lines(title, labels, lines, limit=comparison.tolerance.drift)


def layer_plot(trace: Trace) -> str:
    """Relative error of op outputs by layer."""
    lines = [
        Line("prefill", [error.prefill for error in trace.layers]),
        Line("decode", [error.decode for error in trace.layers]),
    ]
    labels = [str(error.layer) for error in trace.layers]
    return log_lines("Relative error by layer", labels, lines, limit=trace.tolerance)


def _histogram(positions: Sequence[Position]) -> list[float]:
    counts = [0.0] * (len(MARGIN_EDGES) + 1)
    for position in positions:
        counts[sum(position.golden_margin >= edge for edge in MARGIN_EDGES)] += 1
    return counts


def _cell(position: Position) -> tuple[str, str]:
    tip = (
        f"position {position.index}: {position.verdict}, golden {position.golden_token}, ours {position.our_token}, "
        f"rank {position.rank}, our gap {position.our_gap:.4f}, drift {position.drift:.2e}"
    )
    return COLOURS[position.verdict], tip


def _largest_drift(positions: Sequence[Position]) -> float:
    return max((position.drift for position in positions), default=0.0)


def _sparse_labels(prompts: Sequence[PromptComparison]) -> list[str]:
    every = max(1, len(prompts) // 16)
    return [str(prompt.index) if prompt.index % every == 0 else "" for prompt in prompts]
