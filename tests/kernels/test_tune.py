"""The tuner finds the fastest configuration that compiles and computes the same, and writes it where ops read it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.kernels.fake_cuda import FakeCuda
from torch import Tensor
from triton.runtime.errors import OutOfResources

import deltafold
from deltafold import DeviceError, OptionError
from deltafold.cli import main
from deltafold.kernels import tune
from deltafold.kernels.recording import META, launches_go_to
from deltafold.kernels.targets import TARGETS
from deltafold.kernels.tuning_cases import CASES, Case
from deltafold.ops.triton.pinning import chosen, entries_of, pinned_for, read_entries, table_names
from deltafold.ops.triton.prefill import EXPAND_ROWS
from deltafold.ops.triton.softmax import AttentionTile

CUDA = torch.device("cuda", 0)
VALUES = {"BM": (16, 32), "BN": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}


def pins_now() -> AttentionTile:
    return pinned_for(AttentionTile, "mla_decode", "sm_90", "full")


def call() -> Tensor:
    """Wrong at BN 128, and too large at 8 warps."""
    tile = pins_now()
    if tile.num_warps == 8:
        raise OutOfResources(1, 2, "shared memory")
    return torch.full((4,), 2.0 if tile.BN == 128 else 1.0)


def timer(measured: object) -> float:
    """Best at BM 16, 32 rows and 3 stages; the refused ones would be faster still."""
    tile = pins_now()
    slow = {32: 1.5, 16: 1.0}[tile.BM] * {2: 1.3, 3: 1.0, 4: 1.2}[tile.num_stages]
    return 100 * slow * {32: 1.0, 64: 1.1, 128: 0.1}[tile.BN] * {4: 1.0, 8: 0.1}[tile.num_warps]


FAKE = Case(lambda device, shape_class: call, VALUES)


def test_the_best_of_those_that_work_is_found() -> None:
    (start,) = chosen("mla_decode", "sm_90", "full")
    found = tune.search("mla_decode", start, FAKE, CUDA, timer)
    assert found.entry.pins == {"BM": 16, "BN": 32, "num_warps": 4, "num_stages": 3}
    assert (found.microseconds, found.microseconds_before) == pytest.approx((100.0, 100 * 1.5 * 1.3 * 1.1))
    assert pins_now() == AttentionTile(**start.pins)


def test_what_saves_less_than_noise_is_not_taken() -> None:
    (start,) = chosen("mla_decode", "sm_90", "full")
    found = tune.search("mla_decode", start, FAKE, CUDA, lambda measured: 100.0 - 0.1 * pins_now().num_stages)
    assert found.entry.pins == start.pins
    assert found.num_measured > 4


def test_what_does_not_fit_is_never_run() -> None:
    (start,) = chosen("mla_decode", "sm_90", "full")
    case = dataclasses.replace(FAKE, fits=lambda pins: pins["BM"] != 16)
    found = tune.search("mla_decode", start, case, CUDA, timer)
    assert found.entry.pins["BM"] == 32


def test_an_entry_replaces_its_own_and_keeps_the_others(
    fake_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "CASES", {"mla_decode": FAKE})
    (tuned,) = tune.tune_table("mla_decode", CUDA, tmp_path, timer)
    written = read_entries((tmp_path / "mla_decode.json").read_text())
    before = entries_of("mla_decode")
    assert [e for e in written if e.arch == "default"] == [e for e in before if e.arch == "default"]
    (own,) = (e for e in written if e.arch == "sm_90")
    assert own == tuned.entry
    assert (own.card, own.room, own.pins["num_stages"]) == ("Some Card", "full", 3)
    assert "mla_decode: 214.5 -> 100.0 us" in str(tuned)


KERNELS = {
    "gemv_down": "gemv_down_kernel",
    "gemv_up": "gemv_up_kernel",
    "grouped_experts": "experts_up_kernel",
    "linear": "gemv_kernel",
    "mla_decode": "decode_split_kernel",
    "mla_expand": "expand_kernel",
    "mla_prefill": "prefill_kernel",
    "mla_prefill_hopper": "hopper_prefill_kernel",
}
"""One that each table is for."""


@pytest.mark.parametrize("arch", list(TARGETS))
@pytest.mark.parametrize("table", sorted(CASES))
def test_every_table_has_a_case_that_reads_it(table: str, arch: str) -> None:
    """On tensors without memory: each value that the tuner would try reaches a launch."""
    case, target = CASES[table], TARGETS[arch]
    room = "full" if target.shared_memory > 200_000 else "compact"
    entries = chosen(table, f"sm_{target.capability}", room)
    assert {len(entries)} <= {1, 3, 4}
    names: list[str] = []
    with launches_go_to(lambda kernel, *a, **k: names.append(kernel.__name__), target):
        for entry in entries:
            assert case.values.keys() <= tune.flat(entry.pins).keys()
            assert tune.nested(tune.flat(entry.pins)) == entry.pins
            case.prepare(META, entry.shape_class)()
    assert names
    if table in KERNELS and (table != "mla_prefill_hopper" or arch == "sm_90"):
        assert KERNELS[table] in names


def test_no_tile_of_the_attention_is_half_expanded() -> None:
    """Rows that the expansion leaves out may be NaN, and a probability of zero does not hide them."""
    expanded = CASES["mla_expand"]
    assert not expanded.fits({"BM": EXPAND_ROWS // 2})
    assert all(entry.pins["BM"] % EXPAND_ROWS == 0 for entry in entries_of("mla_expand"))
    for table in ("mla_prefill", "mla_prefill_hopper"):
        assert all(EXPAND_ROWS % BN == 0 for BN in CASES[table].values["BN"])
        assert all(EXPAND_ROWS % entry.pins["BN"] == 0 for entry in entries_of(table))


def test_tables_and_cases_are_the_same() -> None:
    assert table_names() == sorted(CASES)


@pytest.mark.parametrize("table", table_names())
def test_every_table_has_a_default_for_unknown_cards_and_says_where_it_comes_from(table: str) -> None:
    entries = entries_of(table)
    for room in ("full", "compact"):
        unknown = chosen(table, "sm_77", room)
        assert unknown
        assert {entry.arch for entry in unknown} == {"default"}
        assert unknown[-1].shape_class in ("", "inf")
    assert all(entry.triton and entry.date for entry in entries)
    assert all((entry.card is None) == (entry.driver is None) for entry in entries)


def test_without_a_gpu_or_a_table_nothing_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeviceError, match="measured on a GPU, and this is cpu"):
        tune.tune_table("mla_decode", torch.device("cpu"), tmp_path)
    with pytest.raises(OptionError, match=r"kernel must be one of delta_prefill, .*, got 'attention'"):
        deltafold.tune_kernels(["attention"], tmp_path)
    assert main(["kernels", "tune", "--kernel", "attention", "-o", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
