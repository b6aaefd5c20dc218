"""The architectures deltafold runs, and what the runner needs of each.

A model is a parameter table plus a forward: `checkpoint/weights.py` fills the table, `runner/` calls the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import ModelConfig
from deltafold.checkpoint.weights import ParameterTable
from deltafold.errors import ConfigError
from deltafold.layers.batch import ForwardBatch
from deltafold.models.deepseek_v2 import DeepseekV2
from deltafold.models.kimi_linear import KimiLinear
from deltafold.models.qwen3_5 import Qwen35
from deltafold.models.qwen3_next import Qwen3Next
from deltafold.ops import Ops


class CausalLM(Protocol):
    """A loaded model."""

    config: ModelConfig
    ops: Ops
    ignored_tensors: ClassVar[tuple[str, ...]]
    """Regular expressions for the names of checkpoint tensors that the model has no use for."""

    @staticmethod
    def parameter_table(config: ModelConfig) -> ParameterTable:
        """The tensors to load, by name."""

    @staticmethod
    def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
        """What each layer keeps between steps."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Ops, residual_dtype: torch.dtype
    ) -> None:
        """`tensors` has the table's names."""

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Final hidden states [L, D] of the tokens `batch.logits_indices`; updates the caches in place."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, D] -> logits [L, vocab] float32."""


ARCHITECTURES: Mapping[str, type[CausalLM]] = {
    "DeepseekV2ForCausalLM": DeepseekV2,
    "KimiLinearForCausalLM": KimiLinear,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35,
    "Qwen3_5MoeForCausalLM": Qwen35,
    "Qwen3_5MoeForConditionalGeneration": Qwen35,
    "Qwen3NextForCausalLM": Qwen3Next,
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class for config.json's `architectures[0]`; ConfigError names an unknown one and those there are."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[architecture]
