"""Tables (Markdown) and plots (SVG) of `docs/numerics.md` from the rows that `precision_study.py` measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.precision_variants import VARIANTS

from deltafold.parity.plots import Line, log_dots

Row = dict[str, Any]


def render(rows: Sequence[Row], prefix: Path) -> str:
    """One table for each model, device and backend; writes one plot of each model's divergences beside `prefix`."""
    order = {name: place for place, name in enumerate(VARIANTS)}
    rows = sorted(rows, key=lambda row: order[row["name"]])
    parts = []
    for model in sorted({row["model"] for row in rows}):
        of_model = sorted(
            (row for row in rows if row["model"] == model), key=lambda row: (row["device"], row["backend"])
        )
        for where in dict.fromkeys((row["device"], row["backend"]) for row in of_model):
            found = [row for row in of_model if (row["device"], row["backend"]) == where]
            parts.append(f"**{model}, {where[0]}, {where[1]}** ({_machine(found)})\n\n{table(found)}")
        plotted = [row for row in of_model if judged(row) is not None]
        path = prefix.with_name(f"{prefix.name}-{model}.svg")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(divergence_plot(model, plotted), encoding="utf-8")
    return "\n\n".join(parts)


def compared(row: Row) -> list[str]:
    """The golden runs the row was compared with, the one with the fewest tokens first."""
    sizes = [name for name, value in row.items() if isinstance(value, dict)]
    return sorted(sizes, key=lambda size: int(row[size]["num_tokens"]))


def judged(row: Row) -> dict[str, Any] | None:
    """The row's figures of the largest golden run it was compared with; None without one."""
    sizes = compared(row)
    return row[sizes[-1]] if sizes else None


def table(rows: Sequence[Row]) -> str:
    """A line for each row; a figure that was not measured is a dash, a row that failed says so."""
    sizes = max((compared(row) for row in rows), key=len, default=[])
    head = ["arithmetic", *(f"tokens matched, {size}" for size in sizes), "prompts identical / near tie / mismatch"]
    head += ["KL a token: prefill, decode", "other token at", "largest gap", "drift: largest, 99 %"]
    head += ["bits per byte", "prefill, decode tok/s"]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for row in rows:
        cells = [row["name"] + _remark(row.get("error"))]
        cells += [f"{row[size]['num_matched']} of {row[size]['num_tokens']}" if size in row else "-" for size in sizes]
        cells += _judged_cells(judged(row))
        cells.append(f"{row['bits_per_byte']:.5f}" if "bits_per_byte" in row else "-")
        speeds = [row.get(f"{phase}_tokens_per_second") for phase in ("prefill", "decode")]
        cells.append(", ".join("-" if speed is None else f"{speed:,.0f}" for speed in speeds))
        lines.append(_line(cells))
    return "\n".join(lines)


def _judged_cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["-"] * 5
    kl = "-" if found["mean_kl"] is None else f"{found['mean_kl']:.1e}"
    return [
        f"{found['num_identical']} / {found['num_near_ties']} / {found['num_mismatches']}",
        f"{kl}, {found['decode_kl']:.1e}",
        f"{found['num_parted']:,} of {found['num_positions']:,}",
        f"{found['largest_gap']:.3f}",
        f"{found['largest_drift']:.2g}, {found['drift_99']:.2g}",
    ]


def divergence_plot(model: str, rows: Sequence[Row]) -> str:
    """KL of every row on a logarithmic axis, prefill and decode."""
    found = [figures for row in rows if (figures := judged(row)) is not None]
    labels = [f"{row['device']} {row['backend']}: {row['name']}" for row in rows]
    series = [
        Line("prefill", [figures["mean_kl"] or 0.0 for figures in found]),
        Line("decode", [figures["decode_kl"] for figures in found]),
    ]
    return log_dots(f"Divergence from float32, {model} (KL, nats a token)", labels, series)


def _remark(error: str | None) -> str:
    if error is None:
        return ""
    return " (not finished)" if error.startswith("not done") else " (**failed**)"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine(rows: Sequence[Row]) -> str:
    """What the rows were computed with, each kind once."""
    kinds = {f"torch {row['torch']}, {row['threads']} thread(s)" for row in rows if "torch" in row}
    return "; ".join(sorted(kinds)) or "nothing measured"
