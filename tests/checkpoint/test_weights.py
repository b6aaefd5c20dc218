"""Tables filled from safetensors: placement, dtypes, one error for all that is wrong, and random tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafold.checkpoint.weights import Init, Source, TensorSpec, also_named, load_tensors, random_tensors
from deltafold.errors import CapacityError, WeightsError

Write = Callable[[dict[str, dict[str, torch.Tensor]]], Path]
CPU = torch.device("cpu")
ONE = "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _plain(name: str, *shape: int, dtype: torch.dtype | None = None) -> TensorSpec:
    return TensorSpec(shape, (Source((name,), shape),), dtype=dtype)


def _load(folder: Path, table: Mapping[str, TensorSpec], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_tensors(folder, table, compute_dtype=dtype, device=CPU)


def test_fused_reshaped_and_renamed(write_checkpoint: Write) -> None:
    parts = {name: torch.randn(3, 5) for name in ("q", "k")}
    decay, experts = torch.randn(1, 1, 4, 1), [torch.randn(2, 3) for _ in range(3)]
    folder = write_checkpoint(
        {
            FIRST: {"k": parts["k"], "decay": decay, "e.1": experts[1]},
            SECOND: {"q": parts["q"], "e.0": experts[0], "other.e.2": experts[2]},
        }
    )
    table = {
        "qk": TensorSpec((6, 5), (Source(("q",), (3, 5), (slice(0, 3),)), Source(("k",), (3, 5), (slice(3, 6),)))),
        "decay": TensorSpec((4,), (Source(("decay",), (1, 1, 4, 1)),)),
        "experts": TensorSpec((3, 2, 3), tuple(Source((f"e.{i}", f"other.e.{i}"), (2, 3), (i,)) for i in range(3))),
    }
    tensors = _load(folder, table)
    assert list(tensors) == list(table)
    assert torch.equal(tensors["qk"], torch.cat([parts["q"], parts["k"]]))
    assert torch.equal(tensors["decay"], decay.view(4))
    assert torch.equal(tensors["experts"], torch.stack(experts))


def test_rows_in_another_order(write_checkpoint: Write) -> None:
    stored = torch.randn(4, 3)
    folder = write_checkpoint({ONE: {"w": stored}})
    tensors = _load(folder, {"w": TensorSpec((4, 3), (Source(("w",), (4, 3), row_order=(2, 0, 3, 1)),))})
    assert torch.equal(tensors["w"], stored[[2, 0, 3, 1]])
    for order in ((0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4)):
        with pytest.raises(WeightsError, match="w: row_order"):
            _load(folder, {"w": TensorSpec((4, 3), (Source(("w",), (4, 3), row_order=order),))})


def test_offset_is_added_to_what_is_stored(write_checkpoint: Write) -> None:
    """A norm's weight stored around zero, in bfloat16, is not rounded by the addition."""
    stored = (torch.randn(5) * 0.01).bfloat16()
    folder = write_checkpoint({ONE: {"norm": stored}})
    spec = TensorSpec((5,), (Source(("norm",), (5,)),), torch.float32, offset=1.0)
    tensors = _load(folder, {"norm": spec}, torch.bfloat16)
    assert torch.equal(tensors["norm"], stored.float() + 1)
    assert not torch.equal(tensors["norm"].bfloat16().float(), tensors["norm"])


def test_a_checkpoint_in_the_other_layout(write_checkpoint: Write) -> None:
    experts = torch.randn(3, 2, 4)
    each = tuple(Source((f"e.{i}",), (2, 4), (i,)) for i in range(3))
    table = {"experts": TensorSpec((3, 2, 4), each, other_sources=(Source(("experts",), (3, 2, 4)),))}
    apart = write_checkpoint({ONE: {f"e.{i}": experts[i].clone() for i in range(3)}})
    assert torch.equal(_load(apart, table)["experts"], experts)
    together = write_checkpoint({ONE: {"experts": experts}})
    assert torch.equal(_load(together, table)["experts"], experts)
    both = write_checkpoint({ONE: {"experts": experts, "e.1": experts[1].clone()}})
    with pytest.raises(WeightsError, match=r"left over: e\.1"):
        _load(both, table)
    neither = write_checkpoint({ONE: {"e.1": experts[1].clone()}})
    with pytest.raises(WeightsError, match=r"missing: e\.0, e\.2"):
        _load(neither, table)


def test_a_second_prefix(write_checkpoint: Write) -> None:
    folder = write_checkpoint({ONE: {"model.text.w": torch.ones(2), "head": torch.zeros(2)}})
    table = also_named({"w": _plain("model.w", 2), "head": _plain("head", 2)}, "model.", "model.text.")
    assert table["w"].sources[0].names == ("model.w", "model.text.w")
    assert table["head"].sources[0].names == ("head",)
    assert torch.equal(_load(folder, table)["w"], torch.ones(2))


def test_one_stored_tensor_may_fill_two_parameters(write_checkpoint: Write) -> None:
    """Tied embeddings: the head reads the embedding."""
    embedding = torch.randn(4, 3)
    folder = write_checkpoint({ONE: {"embed": embedding}})
    tensors = _load(folder, {"embed": _plain("embed", 4, 3), "lm_head": _plain("embed", 4, 3)})
    assert torch.equal(tensors["lm_head"], embedding)


def test_float32_parameters_keep_the_bytes_of_the_file(write_checkpoint: Write) -> None:
    names = ("A_log", "dt_bias", "e_score_correction_bias")
    stored = {name: torch.randn(64) * 3 + 1e-3 for name in names}
    folder = write_checkpoint({ONE: {**stored, "w": torch.randn(8, 8)}})
    table = {name: _plain(name, 64, dtype=torch.float32) for name in names} | {"w": _plain("w", 8, 8)}
    tensors = _load(folder, table, torch.bfloat16)
    for name in names:
        assert tensors[name].dtype == torch.float32
        assert tensors[name].numpy().tobytes() == stored[name].numpy().tobytes()
        assert not torch.equal(stored[name], stored[name].bfloat16().float())
    assert tensors["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion(write_checkpoint: Write, stored: torch.dtype, compute: torch.dtype) -> None:
    value = torch.randn(7, 3).to(stored)
    tensor = _load(write_checkpoint({ONE: {"w": value}}), {"w": _plain("w", 7, 3)}, compute)["w"]
    assert tensor.dtype == compute
    assert torch.equal(tensor, value.to(compute))


def test_scalar_and_empty_tensors(write_checkpoint: Write) -> None:
    folder = write_checkpoint({ONE: {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}})
    tensors = _load(folder, {"scalar": _plain("scalar"), "empty": _plain("empty", 0, 3)})
    assert tensors["scalar"].item() == 1.5
    assert tensors["empty"].shape == (0, 3)


def test_everything_wrong_is_named_at_once_before_data_is_read(write_checkpoint: Write) -> None:
    folder = write_checkpoint(
        {
            FIRST: {"ok": torch.ones(2), "shape": torch.ones(2, 3), "left.over": torch.ones(1)},
            SECOND: {"alias": torch.ones(2), "alias.hub": torch.ones(2), "ints": torch.ones(2, dtype=torch.int32)},
        }
    )
    table = {
        "ok": _plain("ok", 2),
        "shape": _plain("shape", 3, 2),
        "absent": TensorSpec((2,), (Source(("absent.hub", "absent.other"), (2,)),)),
        "absent2": _plain("absent2", 2),
        "alias": TensorSpec((2,), (Source(("alias.hub", "alias"), (2,)),)),
        "ints": _plain("ints", 2),
    }
    calls: list[tuple[int, int]] = []
    with pytest.raises(WeightsError) as caught:
        load_tensors(
            folder, table, compute_dtype=torch.float32, device=CPU, on_progress=lambda *args: calls.append(args)
        )
    message = str(caught.value)
    for part in (
        "missing: absent.hub or absent.other, absent2;",
        "left over: left.over;",
        "under two names: alias.hub and alias;",
        "wrong shape: shape is [2, 3] instead of [3, 2];",
        "dtype other than F32, F16, BF16: ints is I32",
    ):
        assert part in message
    assert "\n" not in message
    assert calls == []


@pytest.mark.parametrize(
    "name",
    ["w.weight_scale", "w.weight_scale_inv", "w.weight_packed", "w.qweight", "w.qzeros", "w.scales", "w.g_idx",
     "w.weight.absmax", "w.weight.quant_state.bitsandbytes__nf4", "experts.gate_up_proj_blocks", "w.input_scale"],
)  # fmt: skip
def test_quantised_checkpoint_is_refused_by_name(write_checkpoint: Write, name: str) -> None:
    folder = write_checkpoint({ONE: {"w": torch.ones(2, 2), name: torch.ones(1)}})
    with pytest.raises(WeightsError, match=f"quantised checkpoints are not supported: {name}$"):
        _load(folder, {"w": _plain("w", 2, 2)})


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8"), (torch.float64, "F64")],
)
def test_other_dtypes_are_refused(write_checkpoint: Write, dtype: torch.dtype, name: str) -> None:
    folder = write_checkpoint({ONE: {"w": torch.ones(4).to(dtype)}})
    with pytest.raises(WeightsError, match=f"w is {name}"):
        _load(folder, {"w": _plain("w", 4)})


def test_ignored_tensors(write_checkpoint: Write) -> None:
    folder = write_checkpoint({ONE: {"w": torch.ones(2), "mtp.0.w": torch.ones(1), "mtp.1.w": torch.ones(1)}})
    table = {"w": _plain("w", 2)}
    for ignore in ((), (r"mtp",), (r"mtp\.0\..*",)):
        with pytest.raises(WeightsError, match=r"left over: .*mtp\.1\.w"):
            load_tensors(folder, table, compute_dtype=torch.float32, device=CPU, ignore=ignore)
    tensors = load_tensors(folder, table, compute_dtype=torch.float32, device=CPU, ignore=(r"x\..*", r"mtp\..*"))
    assert list(tensors) == ["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tensor_that_is_not_finite_is_named(write_checkpoint: Write, dtype: torch.dtype) -> None:
    tensors = {name: torch.randn(50, 7).to(dtype) for name in ("good", "nan", "inf", "minus")}
    tensors["nan"][49, 6] = math.nan
    tensors["inf"][0, 0] = math.inf
    tensors["minus"][25, 3] = -math.inf
    folder = write_checkpoint({ONE: tensors})
    with pytest.raises(WeightsError) as caught:
        _load(folder, {name: _plain(name, 50, 7) for name in tensors}, torch.bfloat16)
    for name in ("nan", "inf", "minus"):
        assert f"{name} is not finite" in str(caught.value)
    assert "good" not in str(caught.value).replace(str(folder), "")


def test_values_beyond_the_compute_dtype(write_checkpoint: Write) -> None:
    folder = write_checkpoint({ONE: {"w": torch.tensor([1.0, -7e4]), "v": torch.tensor([6.5e4])}})
    table = {"w": _plain("w", 2), "v": _plain("v", 1)}
    with pytest.raises(WeightsError, match=r"w has values from -70000 to 1, beyond the 65504 of float16$"):
        _load(folder, table, torch.float16)
    assert _load(folder, table, torch.bfloat16)["w"].isfinite().all()


def test_table_that_leaves_a_hole(write_checkpoint: Write) -> None:
    folder = write_checkpoint({ONE: {"q": torch.ones(2, 3)}})
    hole = TensorSpec((4, 3), (Source(("q",), (2, 3), (slice(0, 2),)),))
    uneven = TensorSpec((2, 3), (Source(("q",), (2, 3), (slice(0, 1),)),))
    for spec in (hole, uneven):
        with pytest.raises(WeightsError, match="wrong entry of the model's table: qk"):
            _load(folder, {"qk": spec})


def test_progress_counts_bytes(write_checkpoint: Write) -> None:
    folder = write_checkpoint({FIRST: {"a": torch.ones(4)}, SECOND: {"b": torch.ones(2, dtype=torch.bfloat16)}})
    calls: list[tuple[int, int]] = []
    load_tensors(
        folder,
        {"b": _plain("b", 2), "a": _plain("a", 4)},
        compute_dtype=torch.float32,
        device=CPU,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(16, 20), (20, 20)]


def test_tensor_that_no_memory_holds() -> None:
    with pytest.raises(CapacityError, match=r"weights: huge takes 4611686018427387904 bytes, which cpu does not"):
        random_tensors({"huge": _plain("huge", 2**60)}, compute_dtype=torch.float32, device=CPU, seed=0)


def _random(table: Mapping[str, TensorSpec], seed: int = 1) -> dict[str, torch.Tensor]:
    return random_tensors(table, compute_dtype=torch.float32, device=CPU, seed=seed)


def test_random_tensors_follow_the_recipe() -> None:
    shape = (200, 100)
    table = {init.name: TensorSpec(shape, (Source((init.name,), shape),), init=init) for init in Init}
    table["bf16"] = TensorSpec(shape, (Source(("bf16",), shape),), dtype=torch.bfloat16)
    tensors = _random(table)
    assert tensors["bf16"].dtype == torch.bfloat16
    assert (tensors["ONES"] == 1).all()
    assert (tensors["ZEROS"] == 0).all()
    for name in ("LINEAR", "bf16"):
        assert abs(tensors[name].float().mean().item()) < 1e-3
        assert tensors[name].float().std().item() == pytest.approx(0.02, rel=0.03)
    for name, low, high in (("CONV", -0.5, 0.5), ("DT_BIAS", -4.6, -2.3)):
        values = tensors[name]
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
        assert values.mean().item() == pytest.approx((low + high) / 2, abs=0.02)
    rates = tensors["A_LOG"].exp()
    assert rates.min() >= 0.999
    assert 15.9 < rates.max() < 16.001
    assert rates.mean().item() == pytest.approx(8.5, abs=0.15)


def test_random_tensors_depend_on_seed_and_key_alone() -> None:
    table = {name: _plain(name, 5, 4) for name in ("a", "b")}
    tensors = _random(table)
    assert not torch.equal(tensors["a"], tensors["b"])
    assert torch.equal(_random({"b": table["b"]})["b"], tensors["b"])
    assert not torch.equal(_random(table, seed=2)["a"], tensors["a"])
    assert torch.equal(_random(table, seed=-1)["a"], _random(table, seed=-1)["a"])


def test_random_tensors_are_like_loaded_ones(tmp_path: Path) -> None:
    table = {"A_log": TensorSpec((3,), (Source(("A_log",), (1, 1, 3, 1)),), torch.float32), "w": _plain("w", 2, 2)}
    drawn = random_tensors(table, compute_dtype=torch.bfloat16, device=CPU, seed=0)
    save_file({"A_log": drawn["A_log"].view(1, 1, 3, 1), "w": drawn["w"]}, tmp_path / ONE)
    loaded = _load(tmp_path, table, torch.bfloat16)
    assert all(torch.equal(loaded[key], drawn[key]) and loaded[key].dtype == drawn[key].dtype for key in table)
    assert set(load_file(tmp_path / ONE)) == set(table)
