"""Rotary position embedding, in place on the heads of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(heads: Tensor, positions: Tensor, inverse_frequencies: Tensor, factor: float, is_interleaved: bool) -> None:
    """See `Ops.rotary`; writes `heads`."""
    F = inverse_frequencies.shape[0]
    angles = (positions.float().unsqueeze(1) * inverse_frequencies).unsqueeze(1)  # [T, 1, F]
    cos, sin = angles.cos().mul_(factor), angles.sin().mul_(factor)
    if is_interleaved:
        first, second = heads[..., 0 : 2 * F : 2], heads[..., 1 : 2 * F : 2]
    else:
        first, second = heads[..., :F], heads[..., F : 2 * F]
    a, b = first.float(), second.float()
    turned = torch.addcmul(a * cos, b, sin, value=-1)
    second.copy_(torch.addcmul(b * cos, a, sin))
    first.copy_(turned)
