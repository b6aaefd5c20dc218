"""Kernels that compute something else are refused by name; right ones are kept."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deltafold.cache.memory import LayerSpec
from deltafold.errors import DeltafoldWarning
from deltafold.ops import Ops, select
from deltafold.runner.self_check import checked_ops

SPECS = [LayerSpec(recurrent_shape=(4, 16, 24), conv_shape=(2 * 2 * 16 + 4 * 24, 3)), LayerSpec(latent_dim=8)]
BY_HEAD = [replace(SPECS[0], decays_by_head=True)]
CPU = torch.device("cpu")


def changed(name: str, change: Any) -> Ops:
    ops = select("portable")
    names = [n for n in dir(Ops) if not n.startswith("_")]
    return cast(Ops, SimpleNamespace(**{n: getattr(ops, n) for n in names} | {name: change(getattr(ops, name))}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("specs", [SPECS, BY_HEAD])
def test_right_ops_are_kept(backend: str, dtype: torch.dtype, specs: list[LayerSpec]) -> None:
    ops = select(backend)
    assert checked_ops(ops, specs, dtype, CPU) == (ops, [])


def wrong_by_head(op: Any) -> Any:
    """Right unless there is one decay a head."""
    return lambda *args: op(*args) * (1.05 if args[3].dim() == 2 else 1.0)


def test_the_decay_s_own_shape_is_checked() -> None:
    """A kernel wrong for one decay a head is kept for a model that has one a row."""
    wrong = changed("delta_prefill", wrong_by_head)
    assert checked_ops(wrong, SPECS, torch.float32, CPU) == (wrong, [])
    with pytest.warns(DeltafoldWarning, match="delta_prefill is off by"):
        assert checked_ops(wrong, BY_HEAD, torch.float32, CPU)[1] == ["delta_prefill"]


def scaled_output(op: Any) -> Any:
    return lambda *args: op(*args) * 1.05


def nan_output(op: Any) -> Any:
    return lambda *args: op(*args) * float("nan")


def stale_state(op: Any) -> Any:
    """Right output, state not written."""

    def wrong(*args: Any) -> Any:
        args = tuple(a.clone() if isinstance(a, torch.Tensor) and a.dim() == 4 else a for a in args)
        return op(*args)

    return wrong


@pytest.mark.parametrize("fault", [scaled_output, nan_output, stale_state])
@pytest.mark.parametrize(
    ("name", "specs"), [("delta_prefill", SPECS), ("low_rank_delta_step", SPECS), ("delta_step", BY_HEAD)]
)
def test_a_wrong_kernel_is_refused_by_name_and_replaced(name: str, specs: list[LayerSpec], fault: Any) -> None:
    wrong = changed(name, fault)
    with pytest.warns(DeltafoldWarning, match=rf"{name} is off by .* at shape \(4, 16, 24\)"):
        ops, failed = checked_ops(wrong, specs, torch.float32, CPU)
    assert failed == [name]
    assert getattr(ops, name) is getattr(select("portable"), name)
    assert ops.rms_norm is wrong.rms_norm


def test_models_without_such_layers_have_nothing_to_check() -> None:
    ops = changed("delta_step", nan_output)
    assert checked_ops(ops, SPECS[1:], torch.float32, CPU) == (ops, [])
