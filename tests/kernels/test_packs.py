"""Packs built without a GPU: what is in them, what is refused, what is launched, and what counts as drift."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from tests.kernels.conftest import SMALL
from tests.kernels.fake_cuda import FakeCuda
from triton.compiler import ASTSource

import deltafold
from deltafold import Engine, KernelPackError, OptionError
from deltafold.checkpoint.config import parse_config
from deltafold.cli import main
from deltafold.kernels import build, load
from deltafold.kernels.build import PackSummary
from deltafold.kernels.load import KernelUse, use_pack
from deltafold.kernels.pack import read_pack
from deltafold.kernels.recording import META, ModelShape, Recorded, record
from deltafold.kernels.source import all_kernels
from deltafold.kernels.targets import TARGETS, published_config
from deltafold.ops import triton as ops
from deltafold.ops.triton import delta_chunked, moe, pinning

SHAPE = ModelShape(SMALL, torch.bfloat16, torch.float32, 2, 64)
CUDA = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float32)


def test_a_pack_has_every_kernel_for_both_architectures(built: PackSummary) -> None:
    pack = read_pack(built.path)
    assert built.num_kernels >= 22
    for arch, target in TARGETS.items():
        section = pack.manifest.archs[arch]
        recorded = record(SHAPE, target)
        assert [(one.kernel, one.key) for one in section.launches] == [
            (f"{r.kernel.__module__}.{r.kernel.__name__}", r.key) for r in recorded
        ]
        assert built.num_launches[arch] == len(recorded)
        assert all(one.shared <= target.shared_memory for one in section.launches)
        # EM_CUDA, in an ELF header
        assert all(pack.cubins[one.cubin][:4] == b"\x7fELF" for one in section.launches)
    sections = pack.manifest.archs
    assert {x.cubin for x in sections["sm_90"].launches}.isdisjoint(x.cubin for x in sections["sm_121a"].launches)
    assert any(one.tensor_maps for one in sections["sm_90"].launches)
    assert all(one.grid for one in sections["sm_90"].launches)


def test_no_path_of_the_machine_that_built_it_is_in_a_pack(built: PackSummary) -> None:
    root = str(Path(deltafold.__file__).parent.parent).encode()
    for data in read_pack(built.path).cubins.values():
        assert root not in data
        assert b".py" not in data


def test_full_shape_is_recorded_as_its_layers_of_each_kind() -> None:
    """Few enough that checking a pack takes seconds."""
    shape = ModelShape(published_config("kimi-linear-48b"), torch.bfloat16, torch.float32, 16, 256)
    recorded = record(shape, TARGETS["sm_90"])
    names = {one.kernel.__name__ for one in recorded}
    known = {"hopper_prefill_kernel", "decode_step_kernel", "experts_up_kernel", "gemv_up_kernel", "route_kernel"}
    assert known <= names


Change = Callable[[dict[str, bytes]], None]


def rewritten(built: PackSummary, folder: Path, change: Change) -> Path:
    """The pack with its entries changed."""
    with zipfile.ZipFile(built.path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    path = folder / "changed.pack"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def cubins(entries: dict[str, bytes]) -> list[str]:
    return sorted(name for name in entries if name.endswith(".cubin"))


def truncate_cubin(entries: dict[str, bytes]) -> None:
    name = cubins(entries)[3]
    entries[name] = entries[name][:-9]


def swap_cubins(entries: dict[str, bytes]) -> None:
    a, b = cubins(entries)[:2]
    entries[a], entries[b] = entries[b], entries[a]


def drop_cubin(entries: dict[str, bytes]) -> None:
    del entries[cubins(entries)[0]]


def add_entry(entries: dict[str, bytes]) -> None:
    entries["more.cubin"] = b"\x7fELF"


def edit_hash(entries: dict[str, bytes]) -> None:
    name = cubins(entries)[0]
    entries["manifest.json"] = entries["manifest.json"].replace(name[:64].encode(), b"0" * 64)


def edit_pin(entries: dict[str, bytes]) -> None:
    assert b'"num_warps": 4' in entries["manifest.json"]
    entries["manifest.json"] = entries["manifest.json"].replace(b'"num_warps": 4', b'"num_warps": 8', 1)


def drop_digest(entries: dict[str, bytes]) -> None:
    del entries["manifest.sha256"]


def signed(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
    entries["manifest.json"] = json.dumps(manifest).encode()
    entries["manifest.sha256"] = hashlib.sha256(entries["manifest.json"]).hexdigest().encode()


def other_format(entries: dict[str, bytes]) -> None:
    signed(entries, json.loads(entries["manifest.json"]) | {"format": 999})


def other_fields(entries: dict[str, bytes]) -> None:
    signed(entries, json.loads(entries["manifest.json"]) | {"more": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate_cubin, r"the cubin of deltafold\.ops\.triton\.\S+ is not what was built"),
        (swap_cubins, r"the cubin of deltafold\.ops\.triton\.\S+ is not what was built"),
        (drop_cubin, r"the cubin of deltafold\.ops\.triton\.\S+ is missing"),
        (add_entry, r"entries that no launch names: more\.cubin"),
        (edit_hash, r"manifest\.json was edited"),
        (edit_pin, r"manifest\.json was edited"),
        (drop_digest, "no kernel pack"),
        (other_format, "format 999, this version reads 1"),
        (other_fields, "has other fields"),
    ],
)
def test_a_changed_pack_is_refused_before_anything_is_used(
    built: PackSummary, tmp_path: Path, fake_gpu: FakeCuda, change: Change, message: str
) -> None:
    path = rewritten(built, tmp_path, change)
    with pytest.raises(KernelPackError, match=message):
        use_pack(path, parse_config(SMALL), DTYPES, CUDA)
    assert fake_gpu.loaded == []
    assert KernelUse(CUDA, path).describe()["by_kernel"] == {}


@pytest.mark.parametrize("cut", [0, 100, 20_000, -30])
def test_a_cut_file_is_refused(built: PackSummary, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.pack"
    path.write_bytes(built.path.read_bytes()[:cut])
    with pytest.raises(KernelPackError, match=r"cut\.pack: damaged"):
        read_pack(path)


def test_bytes_that_changed_inside_are_refused(built: PackSummary, tmp_path: Path) -> None:
    data = bytearray(built.path.read_bytes())
    for at in range(5_000, len(data) - 30_000, len(data) // 7):
        path = tmp_path / "flipped.pack"
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(KernelPackError, match=r"flipped\.pack"):
            read_pack(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelPackError, match=r"absent\.pack: cannot be read: No such file"):
        read_pack(tmp_path / "absent.pack")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("card", "is for sm_121a, sm_90, and Some Card is none of the known ones"),
        ("memory", "sm_90 was built for 232448 bytes of shared memory, Some Card has 101376"),
        ("triton", r"it was built with triton \S+, this is 9\.9"),
        ("experts", "moe is .* in the pack and .* here"),
        ("width", "hidden_size is 64 in the pack and 128 here"),
        ("residual", "residual_dtype is float32 in the pack and bfloat16 here"),
        ("constant", r"intra_chunk_kernel: source changed: LIMIT 100\.0 -> 90\.0"),
        ("driver", "the driver refuses its kernels: cuModuleLoadData: CUDA error 209"),
    ],
)
def test_a_pack_that_does_not_fit_is_refused_and_says_why(
    built: PackSummary, fake_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    config, dtypes = parse_config(SMALL), DTYPES
    match what:
        case "card":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        case "memory":
            facts = replace(load.launch.device_facts(CUDA), shared_memory=101376)
            monkeypatch.setattr(load.launch, "device_facts", lambda device: facts)
        case "triton":
            monkeypatch.setattr(load.triton, "__version__", "9.9")
        case "experts":
            config = parse_config(SMALL | {"num_experts": 8})
        case "width":
            config = parse_config(SMALL | {"hidden_size": 128})
        case "residual":
            dtypes = (torch.bfloat16, torch.bfloat16)
        case "constant":
            monkeypatch.setattr(delta_chunked, "LIMIT", tl.constexpr(90.0))
        case "driver":
            fake_gpu.refused.append(("cuModuleLoadData", 209))
    with pytest.raises(KernelPackError, match=message):
        use_pack(built.path, config, dtypes, CUDA)
    assert KernelUse(CUDA, built.path).describe()["by_kernel"] == {}


def test_what_ops_launch_is_found_in_the_pack_and_reaches_the_driver(
    built: PackSummary, fake_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use_pack(built.path, parse_config(SMALL), DTYPES, CUDA) == built.num_launches["sm_90"]
    use = KernelUse(CUDA, built.path)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x = torch.empty(5, 64, dtype=torch.float32, device=META)
    weight = torch.empty(64, dtype=torch.bfloat16, device=META)
    out = ops.rms_norm(x, weight, 1e-5, torch.bfloat16)
    assert out.shape == (5, 64)
    (seen,) = fake_gpu.launches
    (packed,) = (
        one
        for one in all_kernels()["deltafold.ops.triton.norm.rms_norm_kernel"].device_caches[0][0].values()
        if one.function.value == seen.function
    )
    assert (seen.grid, seen.block[0]) == ((5, 1, 1), 32 * packed.launch.num_warps)
    assert seen.attributes == [(6, 1)]
    names = [name for name, kind in packed.launch.signature.items() if kind != "constexpr"]
    values = dict(zip(names, seen.memory, strict=False))
    assert struct.unpack("<i", values["stride_x"][:4]) == (64,)
    assert struct.unpack("<f", values["eps"][:4])[0] == pytest.approx(1e-5)
    described = use.describe()
    assert described["pack"] == str(built.path)
    assert described["num_made_by_jit"] == 0
    total = sum(counts["pack"] for counts in described["by_kernel"].values())
    assert total == built.num_launches["sm_90"]


def test_what_a_pack_lacks_is_counted_as_made_by_the_compiler(
    built: PackSummary, fake_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pack(built.path, parse_config(SMALL), DTYPES, CUDA)
    use = KernelUse(CUDA, built.path)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x = torch.empty(5, 96, dtype=torch.float32, device=META)
    with pytest.raises(NotImplementedError):  # compiled, and then there is no launcher without a GPU
        ops.silu_and_mul(x)
    assert use.describe()["num_made_by_jit"] == 1
    assert use.describe()["by_kernel"]["silu_and_mul_kernel"]["jit"] == 1


def test_an_unchanged_tree_has_no_drift(built: PackSummary, capsys: pytest.CaptureFixture[str]) -> None:
    drift = deltafold.check_kernels(built.path)
    assert drift.differences == ()
    assert main(["kernels", "check", str(built.path)]) == 0
    assert f"its {built.num_kernels} kernels are those of this version" in capsys.readouterr().out


EDITS = {
    "delta_chunked.py": ("LIMIT = tl.constexpr(100.0)", "LIMIT = tl.constexpr(90.0)"),
    "norm.py": ("    D,\n    eps,\n", "    D: tl.int64,\n    eps,\n"),
    "gated_norm.py": ('do_not_specialize=["num_rows"]', 'do_not_specialize=["num_rows", "eps"]'),
    "latent.py": ("        num_warps=4,", "        num_warps=8,"),
    "conv.py": ('"""`y[t, d]', '"""A word more: `y[t, d]'),
}
"""A constant, the type of a parameter, a mark of a parameter, a pin, and a docstring, which is no change."""


def test_an_edited_constant_pin_and_signature_are_each_named(built: PackSummary, tmp_path: Path) -> None:
    package = Path(deltafold.__file__).parent
    copy = tmp_path / "src" / "deltafold"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("builtin", "__pycache__"))
    for name, (old, new) in EDITS.items():
        file = copy / "ops" / "triton" / name
        text = file.read_text()
        assert old in text, name
        file.write_text(text.replace(old, new, 1))
    command = [sys.executable, "-m", "deltafold", "kernels", "check", str(built.path)]
    found = subprocess.run(
        command, env={"PYTHONPATH": str(copy.parent), "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stderr
    lines = found.stdout.splitlines()
    assert "intra_chunk_kernel: source changed: LIMIT 100.0 -> 90.0" in lines
    assert "rms_norm_kernel: source changed: rms_norm_kernel" in lines
    assert "gated_rms_norm_kernel: signature changed: 'eps' is gone, 'eps unspecialised' is new" in lines
    for arch in TARGETS:
        assert f"latent_store_kernel: pin num_warps 4 -> 8 ({arch})" in lines
    assert not [line for line in lines if "conv_kernel" in line]


def test_a_pack_is_for_the_gpu_backend_alone(built: PackSummary) -> None:
    with pytest.raises(OptionError, match="kernel_pack is for the triton backend on a GPU, this is portable on cpu"):
        Engine.load("builtin", device="cpu", kernel_pack=built.path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": ["sm_75"], "model": "builtin"}, "arch must be one of sm_90, sm_121a, got 'sm_75'"),
        ({"arch": [], "model": "builtin"}, "arch is empty"),
        ({"arch": ["sm_90"], "model_shape": "kimi"}, "model_shape must be one of kimi-linear-48b, got 'kimi'"),
        ({"arch": ["sm_90"]}, "give either model_shape or model"),
        ({"arch": ["sm_90"], "model": "builtin", "max_num_batched_tokens": 63}, "must be an integer >= 64, got 63"),
        ({"arch": ["sm_90"], "model": "builtin", "dtype": "float16"}, "got 'float16'"),
    ],
)
def test_wrong_arguments_of_a_build_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        deltafold.build_kernels(tmp_path / "x.pack", **options)
    assert not list(tmp_path.iterdir())


def test_an_edited_pin_table_is_named_and_refused(
    built: PackSummary, fake_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage more for few tokens an expert, on one architecture."""
    entries = pinning.entries_of("grouped_experts")
    first = entries[0]
    assert (first.arch, first.shape_class) == ("sm_90", "8")
    up = first.pins["up"] | {"num_stages": first.pins["up"]["num_stages"] + 1}
    changed = (replace(first, pins=first.pins | {"up": up}), *entries[1:])
    original = pinning.entries_of
    monkeypatch.setattr(pinning, "entries_of", lambda t: changed if t == "grouped_experts" else original(t))
    moe.grouped_plans.cache_clear()
    try:
        table, line = deltafold.check_kernels(built.path).differences
        assert table == "pins of grouped_experts changed"
        assert line == "experts_up_kernel: pin num_stages 3 -> 4 (sm_90)"
        with pytest.raises(KernelPackError, match="does not fit: pins of grouped_experts changed"):
            use_pack(built.path, parse_config(SMALL), DTYPES, CUDA)
    finally:
        moe.grouped_plans.cache_clear()


@pytest.mark.parametrize(
    ("name", "stage"), [("hopper_experts.hopper_down_kernel", "ttgir"), ("norm.rms_norm_kernel", "ttir")]
)
def test_kernels_with_layouts_of_their_own_skip_the_passes_that_choose_them(name: str, stage: str) -> None:
    kernel = all_kernels()[f"deltafold.ops.triton.{name}"]
    assert build.source_of(Recorded(kernel, "", None, {}, {}, {}, {})).ext == stage


@pytest.mark.parametrize("name", ["hash", "make_ir"])
def test_no_two_threads_parse_kernels_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11.7 ends such a build in a SystemError, now and then."""
    first_is_in, second_is_in = threading.Event(), threading.Event()
    inside: list[int] = []  # how many threads were in, each time one came in
    num = 0

    def watched(*_: object) -> str:
        nonlocal num
        num += 1
        inside.append(num)
        if len(inside) == 1:
            first_is_in.set()
            second_is_in.wait(0.5)  # in vain, unless the second gets in meanwhile
        else:
            second_is_in.set()
        num -= 1
        return ""

    monkeypatch.setattr(ASTSource, name, watched)
    kernel = next(iter(all_kernels().values()))
    threads = [threading.Thread(target=getattr(build.OneParseAtATime(kernel, {}), name)) for _ in range(2)]
    threads[0].start()
    first_is_in.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert inside == [1, 1]
