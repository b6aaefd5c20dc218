"""A comparison as text for a terminal and as plain values for JSON; `page.py` has the HTML page."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from deltafold.parity.compare import Comparison, PromptComparison
from deltafold.parity.golden import Origin
from deltafold.parity.trace import Trace
from deltafold.parity.verdict import Position, Verdict

MAX_POSITIONS = 8
"""Positions listed under a prompt; the JSON has all."""


def text_report(comparison: Comparison, trace: Trace | None) -> str:
    """A few lines on the run, one on each prompt, and the positions that are not identical."""
    tolerance = comparison.tolerance
    lines = [
        f"verdict    {comparison.verdict}",
        f"golden     {describe_origin(comparison.golden)}",
        f"ours       {describe_origin(comparison.ours)}",
        f"model      {comparison.model.name} {comparison.model.fingerprint}",
        f"tolerance  tie {tolerance.tie:g}, drift {tolerance.drift:g}, kl {tolerance.kl:g} nats ({tolerance.reason})",
        f"tokens     {comparison.num_matched} of {comparison.num_tokens} matched",
        "prompts    " + ", ".join(f"{comparison.count(verdict)} {verdict}" for verdict in Verdict),
        f"mean kl    {_number(comparison.mean_kl)} nats a teacher-forced token",
        "",
    ]
    for prompt in comparison.prompts:
        lines += _prompt_lines(prompt)
    if trace is not None:
        lines += ["", *trace_lines(trace)]
    return "\n".join(lines)


def trace_lines(trace: Trace) -> list[str]:
    """What the layer trace found, and each layer's error."""
    where = "no tensor left tolerance" if trace.finding is None else str(trace.finding)
    others = [f"           then {finding}" for finding in trace.findings[1:MAX_POSITIONS]]
    head = f"{trace.num_prefill_tokens} prompt tokens, {trace.num_decodes} decode steps, {trace.num_tensors} tensors"
    lines = [f"trace      {where}", *others, f"           ({head}; against the reference backend in float32)"]
    lines += [
        f"  layer {error.layer:<3} prefill {error.prefill:.2e}  decode {error.decode:.2e}" for error in trace.layers
    ]
    return lines


def json_report(comparison: Comparison, trace: Trace | None) -> dict[str, Any]:
    """Everything, as values that `json.dumps` writes; infinite errors become null."""
    return {
        "verdict": comparison.verdict,
        "num_matched": comparison.num_matched,
        "counts": {str(verdict): comparison.count(verdict) for verdict in Verdict},
        "mean_kl": comparison.mean_kl,
        **_finite(asdict(comparison)),
        "trace": None if trace is None else _finite(asdict(trace)),
    }


def describe_origin(origin: Origin) -> str:
    """One line: engine, version, dtypes, backend, device."""
    return (
        f"{origin.engine} {origin.engine_version}, {origin.dtype}, residual {origin.residual_dtype}, "
        f"{origin.backend} on {origin.device}"
    )


def _prompt_lines(prompt: PromptComparison) -> list[str]:
    first = "none" if prompt.first_divergence is None else str(prompt.first_divergence)
    lines = [f"prompt {prompt.index:<4} {prompt.verdict:<10} first divergence {first}"]
    if prompt.failure:
        lines.append(f"  {prompt.failure}")
    for path, positions in (("decode", prompt.decode), ("prefill", prompt.prefill)):
        listed = [position for position in positions if position.verdict is not Verdict.IDENTICAL]
        lines += [f"  {path:<7} {_position_text(position)}" for position in listed[:MAX_POSITIONS]]
        if len(listed) > MAX_POSITIONS:
            lines.append(f"  {path:<7} and {len(listed) - MAX_POSITIONS} more")
    return lines


def _position_text(position: Position) -> str:
    return (
        f"{position.index:>4} {position.verdict:<9} golden {position.golden_token} ours {position.our_token} "
        f"rank {position.rank}, margin golden {position.golden_margin:.4f} ours {position.our_margin:.4f}, "
        f"gap golden {position.golden_gap:.4f} ours {position.our_gap:.4f}, drift {position.drift:.2e}"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2e}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
