"""The ways to compute that `precision_study.py` compares, and an engine that computes as one of them says.

What an engine has no option for is changed in the model: rounded states, prefill by the recurrence, expanded
decode. A change that no step went through is an error, not a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deltafold import Engine
from deltafold.cache.memory import LayerCache
from deltafold.checkpoint.config import ModelConfig
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.mla import Mla
from deltafold.models import model_class
from deltafold.ops import Ops

CACHE_BYTES = 2**31
"""For an engine's caches: several share a device."""


@dataclass(frozen=True)
class Variant:
    """One way to compute. The last three are not options of an engine: the study changes the model. `is_eager` is
    without captured decode steps, which only the Triton backend has."""

    dtype: str = "float32"
    residual_dtype: str = "float32"
    is_batched_otherwise: bool = False
    is_eager: bool = False
    has_bfloat16_state: bool = False
    has_recurrent_prefill: bool = False
    has_expanded_decode: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether an engine has no option for it."""
        return self.has_bfloat16_state or self.has_recurrent_prefill or self.has_expanded_decode


VARIANTS = {
    "float32": Variant(),
    "float32, other batches": Variant(is_batched_otherwise=True),
    "float32, eager": Variant(is_eager=True),
    "float32, residual bfloat16": Variant(residual_dtype="bfloat16"),
    "float32, state bfloat16": Variant(has_bfloat16_state=True),
    "float32, recurrent prefill": Variant(has_recurrent_prefill=True),
    "float32, expanded decode": Variant(has_expanded_decode=True),
    "bfloat16": Variant(dtype="bfloat16"),
    "bfloat16, eager": Variant(dtype="bfloat16", is_eager=True),
    "bfloat16, other batches": Variant(dtype="bfloat16", is_batched_otherwise=True),
    "bfloat16, residual bfloat16": Variant(dtype="bfloat16", residual_dtype="bfloat16"),
    "bfloat16, state bfloat16": Variant(dtype="bfloat16", has_bfloat16_state=True),
    "bfloat16, recurrent prefill": Variant(dtype="bfloat16", has_recurrent_prefill=True),
    "bfloat16, expanded decode": Variant(dtype="bfloat16", has_expanded_decode=True),
}


@dataclass
class Uses:
    """How often what the study changed has run."""

    prefills: int = 0
    decodes: int = 0

    def check(self, variant: Variant) -> None:
        """RuntimeError if a change was never used: the row would be another variant's."""
        needs_prefill = variant.has_bfloat16_state or variant.has_recurrent_prefill
        needs_decode = variant.has_bfloat16_state or variant.has_expanded_decode
        if (needs_prefill and self.prefills == 0) or (needs_decode and self.decodes == 0):
            raise RuntimeError(f"the engine went past what the study changed: {self}, {variant}")


class StudyOps:
    """An op list with the delta rule changed: states rounded after every call, prefills by the recurrence."""

    def __init__(self, ops: Ops, variant: Variant, uses: Uses) -> None:
        self._ops = ops
        self._variant = variant
        self._uses = uses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def chunked_delta_rule(self, *args: Tensor) -> Tensor:
        op = self._ops.recurrent_delta_rule if self._variant.has_recurrent_prefill else self._ops.chunked_delta_rule
        self._uses.prefills += 1
        return self._rounded(op(*args), state=args[5], slots=args[7])

    def recurrent_delta_rule(self, *args: Tensor) -> Tensor:
        self._uses.decodes += 1
        return self._rounded(self._ops.recurrent_delta_rule(*args), state=args[5], slots=args[7])

    def delta_prefill(self, q: Tensor, k: Tensor, v: Tensor, raw_gate: Tensor, beta: Tensor, *rest: Tensor) -> Tensor:
        A_log, dt_bias, *state = rest
        g = self._ops.decay_gate(raw_gate, A_log, dt_bias)
        return self.chunked_delta_rule(q, k, v, g, torch.sigmoid(beta.float()), *state)

    def delta_step(self, *args: Any) -> Tensor:
        self._uses.decodes += 1
        return self._rounded(self._ops.delta_step(*args), state=args[11], slots=args[12])

    def _rounded(self, output: Tensor, *, state: Tensor, slots: Tensor) -> Tensor:
        if self._variant.has_bfloat16_state:
            # A padded row rounds slot 0 instead, which changes nothing: every state has been rounded already.
            rows = slots.clamp(min=0).long()
            state.index_copy_(0, rows, state[rows].bfloat16().float())
        return output


@dataclass(frozen=True)
class ExpandedMla:
    """A latent attention layer that treats decodes as prefills of one token."""

    mixer: Mla
    uses: Uses = field(compare=False)

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        self.uses.decodes += batch.num_decodes
        expanded = replace(
            batch,
            num_decodes=0,
            prefill_start_loc=batch.query_start_loc,
            num_prefill_blocks=batch.block_table.shape[1],
        )
        return self.mixer.forward(x, expanded, cache, ops)


def changed(kind: Any, variant: Variant, uses: Uses) -> Any:
    """A model class that computes as the variant says. A class, because an engine captures its decode steps as soon as
    the model is made."""

    class Changed(kind):  # type: ignore[misc]  # the class of whatever architecture the checkpoint has
        def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Any, residual_dtype: torch.dtype):
            if variant.has_bfloat16_state or variant.has_recurrent_prefill:
                ops = StudyOps(ops, variant, uses)
            super().__init__(config, tensors, ops, residual_dtype)
            if variant.has_expanded_decode:
                self.decoder.layers[:] = [
                    replace(layer, mixer=ExpandedMla(layer.mixer, uses)) if isinstance(layer.mixer, Mla) else layer
                    for layer in self.decoder.layers
                ]

    return Changed


@contextmanager
def loaded(model: str, variant: Variant, device: str, backend: str) -> Iterator[Engine]:
    """An engine that computes as the variant says. RuntimeError at the end if a change was never used."""
    options: dict[str, Any] = {"max_num_seqs": 64}
    if variant.is_batched_otherwise:
        options = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "prefix_cache": False}
    if variant.is_eager or variant.is_changed:  # what a changed part is called for can be seen only then
        options["decode_graphs"] = False
    if device == "cuda":
        options |= {"free_memory_floor": 0.0}
    uses = Uses()
    with (
        mock.patch("deltafold.api.model_class", lambda name: changed(model_class(name), variant, uses)),
        # The caches' size is given; what a step takes beside them need not be found out, shape by shape.
        mock.patch("deltafold.api.warm_up", return_value=CACHE_BYTES),
    ):
        engine = Engine.load(
            model,
            device=device,  # type: ignore[arg-type]  # the command line's choices are the literals
            dtype=variant.dtype,  # type: ignore[arg-type]
            residual_dtype=variant.residual_dtype,  # type: ignore[arg-type]
            backend=backend,  # type: ignore[arg-type]
            memory=CACHE_BYTES,
            show_progress=False,
            **options,
        )
    with engine:
        yield engine
    uses.check(variant)
