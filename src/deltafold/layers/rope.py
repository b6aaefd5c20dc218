"""Rotary position embeddings: frequencies from the configuration, YaRN's included; the turning is an op."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafold.checkpoint.config import RopeConfig, YarnConfig
from deltafold.ops import Ops


@dataclass(frozen=True, slots=True)
class Rotary:
    """What a model's attention layers share."""

    inverse_frequencies: Tensor  # [F] float32
    factor: float
    is_interleaved: bool

    @classmethod
    def of(cls, config: RopeConfig, device: torch.device, *, is_interleaved: bool) -> Rotary:
        """`is_interleaved`: a pair is two neighbouring values, else a value and the one half a turn's width on."""
        factor = 1.0 if config.yarn is None else config.yarn.rotation_factor
        return cls(inverse_frequencies(config).to(device), factor, is_interleaved)

    def turn(self, x: Tensor, positions: Tensor, ops: Ops) -> None:
        """In place: the first 2 * F values of every head of x [T, H, K]; positions [T]."""
        ops.rotary(x, positions, self.inverse_frequencies, self.factor, self.is_interleaved)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians a token for each pair of values, [dim / 2] float32 on the CPU."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    wavelengths = config.theta**exponents
    if config.yarn is None:
        return 1.0 / wavelengths
    kept = 1.0 - _interpolated_share(config, config.yarn)
    return (1.0 / (config.yarn.factor * wavelengths)) * (1.0 - kept) + (1.0 / wavelengths) * kept


def _interpolated_share(config: RopeConfig, yarn: YarnConfig) -> Tensor:
    """[dim / 2]: 0 for pairs that turn more than `beta_fast` times over the original context, 1 for less than
    `beta_slow` times, a ramp between."""

    def pair_of(num_turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return config.dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # a ramp needs some width
    return ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
