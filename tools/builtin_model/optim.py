"""Muon for the matrices inside the layers, AdamW for everything else, as two optimizers stepped together.

Muon (K. Jordan 2024, with the scaling of arXiv 2502.16982): momentum, orthogonalised by a Newton-Schulz iteration.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Near-orthogonal factors of a stack of matrices [N, R, C], by a quintic Newton-Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.bfloat16)
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if wide else x


class Muon(torch.optim.Optimizer):
    """Parameters are 2-D matrices or stacks of them (experts); those of one shape are updated in one batch."""

    def __init__(
        self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                moving = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    moving.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
                rows, columns = shape[-2:]
                update = orthogonalise(torch.stack(moving).view(-1, rows, columns)).to(torch.float32)
                update = update.view(len(parameters), *shape) * (0.2 * max(rows, columns) ** 0.5)
                for parameter, change in zip(parameters, update, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])


def make_optimizers(model: torch.nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """The layers' matrices: Muon. Embeddings, lm_head, routers: AdamW, a tenth of the decay. The rest: AdamW, none."""
    matrices, tables, others = [], [], []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name or name.endswith("gate.weight"):
            tables.append(parameter)
        elif parameter.ndim in (2, 3) and "conv1d" not in name and "norm" not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": tables, "weight_decay": weight_decay / 10}, {"params": others, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return [
        Muon(matrices, lr, weight_decay=weight_decay),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused),
    ]
