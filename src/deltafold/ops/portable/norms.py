"""RMS norms, the gated activation and gating.

In few PyTorch calls: on the decode path a call costs more than its arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltafold.ops import Activation


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `Ops.rms_norm`."""
    if x.dtype == weight.dtype == dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x.float(), weight.shape, weight.float(), eps).to(dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `Ops.add_rms_norm`; writes `residual`."""
    if x.dtype == residual.dtype:
        residual.add_(x)
    else:
        residual.copy_(residual.float() + x.float())
    return rms_norm(residual, weight, eps, dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation) -> Tensor:
    """See `Ops.gated_rms_norm`."""
    gate32 = gate.float()
    factor = torch.sigmoid(gate32) if activation == "sigmoid" else F.silu(gate32)
    return factor.mul_(rms_norm(x, weight, eps, torch.float32)).to(gate.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `Ops.silu_and_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(x.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `Ops.sigmoid_mul`."""
    return (torch.sigmoid(gate.float()) * x.float()).to(x.dtype)
