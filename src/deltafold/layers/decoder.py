"""A decoder of layers: the loop over them with its residual stream, the embedding, the head and their table entries.

Every model of `models/` is one, with layers of its own choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache
from deltafold.checkpoint.config import ModelConfig
from deltafold.checkpoint.weights import TensorSpec
from deltafold.errors import ConfigError
from deltafold.layers.basic import NormSpec, embed, fused_rows_spec
from deltafold.layers.batch import ForwardBatch
from deltafold.ops import Ops

_Part = TypeVar("_Part")


class Mixer(Protocol):
    """What mixes tokens."""

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        """x [T, D] -> [T, D]; updates the layer's cache."""


class FeedForward(Protocol):
    """What follows the mixer."""

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [T, D] -> [T, D]."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """`h += mixer(norm(h)); h += feed_forward(norm(h))`; the norms live in the decoder's loop, fused with the adds."""

    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    mixer: Mixer
    feed_forward: FeedForward

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str, mixer: Mixer, feed_forward: FeedForward) -> DecoderLayer:
        norms = (tensors[f"{prefix}input_layernorm"], tensors[f"{prefix}post_attention_layernorm"])
        return cls(*norms, mixer, feed_forward)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Token ids to hidden states to logits."""

    layers: list[DecoderLayer]
    embed_tokens: Tensor  # [vocab, D]
    norm: Tensor  # [D]
    lm_head: Tensor  # [vocab, D]
    eps: float
    residual_dtype: torch.dtype

    @staticmethod
    def table(config: ModelConfig, norm_spec: NormSpec) -> dict[str, TensorSpec]:
        """Entries of everything but mixers and feed-forwards."""
        D, vocab = config.hidden_size, config.vocab_size
        table = {
            "model.embed_tokens.weight": fused_rows_spec([(("model.embed_tokens.weight",), vocab)], D, 0),
            "model.norm.weight": norm_spec("model.norm.weight", D),
        }
        if not config.tie_word_embeddings:
            table["lm_head.weight"] = fused_rows_spec([(("lm_head.weight",), vocab)], D, 0)
        for i in range(config.num_hidden_layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                table[f"model.layers.{i}.{norm}"] = norm_spec(f"model.layers.{i}.{norm}.weight", D)
        return table

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        residual_dtype: torch.dtype,
        layers: Sequence[DecoderLayer],
    ) -> Decoder:
        embed_tokens = tensors["model.embed_tokens.weight"]
        return cls(
            layers=list(layers),
            embed_tokens=embed_tokens,
            norm=tensors["model.norm.weight"],
            lm_head=tensors.get("lm_head.weight", embed_tokens),
            eps=config.rms_norm_eps,
            residual_dtype=residual_dtype,
        )

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], ops: Ops) -> Tensor:
        """Final hidden states [L, D] of the tokens `batch.logits_indices`; updates the caches in place."""
        eps, dtype = self.eps, self.embed_tokens.dtype
        residual = embed(batch.token_ids, self.embed_tokens, self.residual_dtype)  # [T, D]
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps, dtype)
        last = len(self.layers) - 1
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x = layer.mixer.forward(x, batch, cache, ops)
            if i == last and batch.logits_indices is not None:
                # From here on only the rows whose logits are wanted matter.
                x, residual = x[batch.logits_indices], residual[batch.logits_indices]
                if x.shape[0] == 0:
                    break
            x = ops.add_rms_norm(x, residual, layer.post_norm, eps, dtype)
            x = layer.feed_forward.forward(x, ops)
            next_norm = self.norm if i == last else self.layers[i + 1].input_norm
            x = ops.add_rms_norm(x, residual, next_norm, eps, dtype)
        return x

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """hidden [L, D] -> logits [L, vocab] float32."""
        return ops.linear(hidden, self.lm_head, torch.float32)


def needed(part: _Part | None, name: str) -> _Part:
    """`part`; ConfigError if the configuration has none."""
    if part is None:
        raise ConfigError(f"a layer needs the {name} fields, and config.json has none")
    return part
