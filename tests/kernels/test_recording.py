"""What an engine's start launches is all that serving launches, whatever decodes and prefills a step has."""

from __future__ import annotations

import json
from typing import Any

import torch

from deltafold.checkpoint.folder import BUILTIN, resolve_folder
from deltafold.kernels import recording
from deltafold.kernels.recording import META, ModelShape, Recorded, record
from deltafold.kernels.source import kernel_name
from deltafold.kernels.targets import target_of
from deltafold.runner.warm_up import step_of

PREFILLS = ([1], [2], [3], [4], [33], [130], [3, 5], [1, 1])


def test_a_prefill_behind_any_number_of_decodes_launches_what_the_start_did(monkeypatch: Any) -> None:
    """The rows of its prefills then start anywhere in a tensor, where an address may lack the alignment of the first:
    in this model some rows are no multiple of 16 bytes."""
    raw = json.loads((resolve_folder(BUILTIN) / "config.json").read_text())
    shape, target = ModelShape(raw, torch.bfloat16, torch.float32, 8, 512), target_of("sm_90")

    def keys(recorded: list[Recorded]) -> set[tuple[str, str]]:
        return {(kernel_name(one.kernel), one.key) for one in recorded}

    at_start = keys(record(shape, target))
    monkeypatch.setattr(recording, "check_cases", lambda *facts: ())
    monkeypatch.setattr(recording, "graph_sizes", lambda max_num_seqs: ())
    for num_decodes in (1, 2, 3, 4, 6, 8):
        steps = [step_of([1] * num_decodes + sizes, num_decodes, META) for sizes in PREFILLS]
        monkeypatch.setattr(recording, "warm_up_batches", lambda *limits, steps=steps: steps)
        assert keys(record(shape, target)) - at_start == set(), num_decodes
