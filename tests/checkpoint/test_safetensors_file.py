"""Files that are not what they should be: each is a WeightsError that names the file, never anything else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from deltafold.checkpoint.safetensors_file import INDEX_NAME, SINGLE_NAME, read_headers
from deltafold.checkpoint.weights import Source, TensorSpec, load_tensors
from deltafold.errors import WeightsError

Write = Callable[[dict[str, dict[str, torch.Tensor]]], Path]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GOOD = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
TABLE = {
    "a": TensorSpec((2, 3), (Source(("a",), (2, 3)),)),
    "b": TensorSpec((4,), (Source(("b",), (4,)),)),
}


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder, TABLE, compute_dtype=torch.float32, device=torch.device("cpu"))


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(dtype: Any = "F32", shape: Any = (1,), data_offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets)}


def test_the_good_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(GOOD)
    assert torch.equal(_load(tmp_path)["a"], torch.arange(6.0).view(2, 3))
    stored = read_headers(tmp_path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
    }


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_truncated_at_every_byte(tmp_path: Path, length: int) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(GOOD[:length])
    with pytest.raises(WeightsError, match=r"model\.safetensors (is truncated|is not a safetensors file)"):
        _load(tmp_path)


def test_truncated_data_names_the_tensors_concerned(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(GOOD[:-1])
    with pytest.raises(WeightsError, match=rf"{len(GOOD) - 1} bytes instead of {len(GOOD)}; concerned: b$"):
        _load(tmp_path)


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_corrupted_bytes_load_or_are_a_weights_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / SINGLE_NAME).write_bytes(content)
    try:
        tensors = _load(tmp_path)
    except WeightsError:
        return
    assert tensors["a"].shape == (2, 3)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes"),
    "text": (b"version https://git-lfs.github.com/spec/v1\n", "is truncated or not a safetensors file"),
    "pickle": (b"\x80\x02" * 40, "is truncated or not a safetensors file"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", f"said to have {2**63} bytes"),
    "no header": (struct.pack("<Q", 0), "header of model.safetensors is not valid JSON"),
    "header not JSON": (_file(b"{" * 20), "not valid JSON"),
    "header too deep": (_file(b"[" * 100_000), "not valid JSON"),
    "header not UTF-8": (_file(b'{"\xff": 1}'), "not valid JSON"),
    "header a list": (_file([]), "must hold a JSON object"),
    "tensor twice": (_file(b'{"a": 1, "a": 2}'), "has a key twice: a"),
    "entry not an object": (_file({"a": 3}), "entry of a must have dtype, shape and data_offsets, got 3"),
    "entry without shape": (_file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"), "entry of a must have"),
    "unknown dtype": (_file({"a": _entry("F33")}, b"1234"), "entry of a has the unknown dtype 'F33'"),
    "dtype not a string": (_file({"a": _entry(["F32"])}, b"1234"), "unknown dtype"),
    "negative shape": (_file({"a": _entry(shape=(-1, -1))}, b"1234"), r"entry of a has shape \[-1, -1\]"),
    "fractional shape": (_file({"a": _entry(shape=(1.0,))}, b"1234"), "entry of a has shape"),
    "boolean shape": (_file({"a": _entry(shape=(True,))}, b"1234"), "entry of a has shape"),
    "enormous shape": (_file({"a": _entry(shape=[2**61] * 60)}, b"1234"), "entry of a has 4 bytes, which is not F32"),
    "three offsets": (_file({"a": _entry(data_offsets=(0, 2, 4))}, b"1234"), "entry of a has shape"),
    "reversed offsets": (_file({"a": _entry(data_offsets=(4, 0))}, b"1234"), "entry of a has -4 bytes"),
    "bytes and shape differ": (_file({"a": _entry(shape=(2,))}, b"1234"), "entry of a has 4 bytes, which is not F32"),
    "gap": (_file({"a": _entry(data_offsets=(4, 8))}, b"12345678"), "a begins at byte"),
    "overlap": (_file({"a": _entry(), "b": _entry(data_offsets=(2, 6))}, b"123456"), "b begins at byte"),
    "trailing bytes": (_file({"a": _entry()}, b"12345"), "1 more than its header describes"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_file_is_named(tmp_path: Path, kind: str) -> None:
    content, message = BAD_FILES[kind]
    (tmp_path / SINGLE_NAME).write_bytes(content)
    with pytest.raises(WeightsError, match=message) as caught:
        _load(tmp_path)
    assert SINGLE_NAME in str(caught.value)


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).mkdir()
    with pytest.raises(WeightsError, match=r"model\.safetensors' cannot be read"):
        _load(tmp_path)


def test_file_that_shrinks_while_it_is_read(write_checkpoint: Write) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    folder = write_checkpoint({FIRST: {"a": tensors["a"]}, SECOND: {"b": tensors["b"]}})

    def shrink(done: int, total: int) -> None:
        content = (folder / SECOND).read_bytes()
        (folder / SECOND).write_bytes(content[:-1])

    with pytest.raises(WeightsError, match=f"{SECOND} ended within b: it changed while being read"):
        load_tensors(folder, TABLE, compute_dtype=torch.float32, device=torch.device("cpu"), on_progress=shrink)


def _sharded(write: Write) -> Path:
    return write({FIRST: {"a": torch.ones(2, 3)}, SECOND: {"b": torch.ones(4)}})


def _edit_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    for name, file in changes.items():
        index["weight_map"][name] = file
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_sharded(write_checkpoint: Write) -> None:
    assert set(_load(_sharded(write_checkpoint))) == {"a", "b"}


def test_every_problem_of_the_shards_is_named(write_checkpoint: Write) -> None:
    folder = write_checkpoint(
        {
            FIRST: {"a": torch.ones(2, 3), "both": torch.ones(1)},
            SECOND: {"b": torch.ones(4), "both": torch.ones(1), "unlisted": torch.ones(1)},
        }
    )
    index = json.loads((folder / INDEX_NAME).read_text())
    del index["weight_map"]["unlisted"]
    index["weight_map"] |= {"absent": FIRST, "gone": "gone.safetensors", "up": "../x.safetensors", "odd": 3}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (folder / "truncated.safetensors").write_bytes(b"1234")
    _edit_index(folder, cut="truncated.safetensors")
    with pytest.raises(WeightsError) as caught:
        _load(folder)
    for part in (
        f"absent is not in {FIRST}, where {INDEX_NAME} lists it",
        "'gone.safetensors' cannot be read",
        "up is in '../x.safetensors', which is not the name",
        "odd is in 3, which is not the name",
        "truncated.safetensors is not a safetensors file",
        f"both is in both {FIRST} and {SECOND}",
        f"unlisted is in {SECOND}, where {INDEX_NAME} does not list it",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "..", "", "a/b.safetensors", "weights.bin", None, ["x"], "\0.safetensors", "\ud800.safetensors"],
)
def test_index_cannot_name_other_files(write_checkpoint: Write, file: object) -> None:
    folder = _sharded(write_checkpoint)
    _edit_index(folder, b=file)
    with pytest.raises(WeightsError, match=r"not the name of a safetensors file|cannot be read"):
        _load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\ud7ff{"])
def test_bad_index(write_checkpoint: Write, text: str) -> None:
    folder = _sharded(write_checkpoint)
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        _load(folder)


def test_stray_single_file_beside_an_index(write_checkpoint: Write) -> None:
    folder = _sharded(write_checkpoint)
    (folder / SINGLE_NAME).write_bytes(GOOD)
    with pytest.raises(WeightsError, match=r"both .* are there; remove one"):
        _load(folder)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": SINGLE_NAME, "b": SINGLE_NAME}}))
    assert set(_load(folder)) == {"a", "b"}


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no such folder"):
        _load(tmp_path / "nothing")
    with pytest.raises(WeightsError, match=rf"has neither model\.safetensors nor {INDEX_NAME}$"):
        _load(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(GOOD)
    with pytest.raises(WeightsError, match=r"files that no index lists: weights\.safetensors"):
        _load(tmp_path)
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(WeightsError, match=r"pickle checkpoints are not read: model\.pt, pytorch_model\.bin"):
        _load(tmp_path)
