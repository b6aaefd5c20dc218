"""Numbers of the host on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def staged(values: Sequence[float] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers on `device`. To a GPU they go through pinned memory, in the stream's order: a copy
    from ordinary memory would hold the host until the device has caught up."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
