"""`deltafold plan`: the numbers are the configuration's, add up, and agree with what an engine reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stepping import LoadedModel

from deltafold import CapacityError, Engine, OptionError, plan_capacity
from deltafold.cache.memory import bytes_per_block, bytes_per_slot
from deltafold.cli import main
from deltafold.kernels.targets import published_config

GIB = 2**30


@pytest.fixture(scope="module")
def full_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of the published shape, and nothing else."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "config.json").write_text(json.dumps(published_config("kimi-linear-48b")))
    return folder


def test_the_published_shape_on_one_card(full_folder: Path) -> None:
    plan = plan_capacity(full_folder, memory=140 * GIB, context=32768)
    assert plan.dtype == "bfloat16"
    assert 98.2e9 < plan.weights < 98.4e9  # 49.12 B parameters, two bytes each
    state, taps = 32 * 128 * 128 * 4, 3 * 4096 * 3 * 2
    assert plan.bytes_per_slot == 20 * (state + taps) == 43417600
    assert plan.bytes_per_block == 7 * 576 * 2 * 64
    assert plan.bytes_per_sequence == plan.bytes_per_slot + 512 * plan.bytes_per_block
    assert plan.floor == int(140 * GIB * 0.06)
    assert plan.budget + plan.weights + plan.activations + plan.graphs + plan.floor == 140 * GIB
    assert plan.num_that_fit == plan.budget // plan.bytes_per_sequence > 64 == plan.num_sequences
    assert plan_capacity(full_folder, memory=140 * GIB, context=32768, max_num_seqs=1000).num_sequences > 64


def test_twice_the_context_takes_more_but_the_state_is_the_same(full_folder: Path) -> None:
    short, long = (plan_capacity(full_folder, memory=140 * GIB, context=c) for c in (1024, 2048))
    assert long.bytes_per_sequence - short.bytes_per_sequence == 16 * short.bytes_per_block


def test_what_does_not_fit_says_where_the_memory_went(full_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CapacityError, match=r"not one sequence fits(.|\n)*weights +-9\d\.\d{3} GiB"):
        plan_capacity(full_folder, memory=80 * GIB, context=32768)
    assert main(["plan", "--model", str(full_folder), "--memory", "80GiB", "--context", "32768"]) == 2
    assert "not one sequence fits" in capsys.readouterr().err


def test_the_command_prints_the_table(full_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(full_folder), "--memory", "140GiB", "--context", "32768"]) == 0
    out = capsys.readouterr().out
    assert "140.000 GiB" in out
    assert "state 41.41 MiB and 512 blocks of 64 tokens, 504.0 KiB each" in out
    assert out.rstrip().splitlines()[-1].startswith("sequences: 64; memory for ")


def test_it_agrees_with_an_engine(tiny: LoadedModel, tiny_folder: Path, engine: Engine) -> None:
    plan = plan_capacity(tiny_folder, memory=GIB, context=640, dtype="float32")
    memory = engine.describe()["memory"]
    assert (plan.bytes_per_slot, plan.bytes_per_block) == (memory["bytes_per_slot"], memory["bytes_per_block"])
    assert plan.bytes_per_slot == bytes_per_slot(tiny.specs, torch.float32)
    assert plan.bytes_per_block == bytes_per_block(tiny.specs, torch.float32)
    tensors = [tensor for name, tensor in _tensors(tiny.model) if name]
    assert plan.weights == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors(value: Any, name: str = "model") -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a model, by where it is kept; one object counted once."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}

    def visit(item: Any, path: str) -> None:
        if isinstance(item, torch.Tensor):
            seen.setdefault(item.data_ptr(), (path, item))
        elif isinstance(item, list | tuple):
            for i, part in enumerate(item):
                visit(part, f"{path}.{i}")
        elif type(item).__module__.startswith("deltafold.") and "config" not in type(item).__module__:
            for attribute in getattr(item, "__slots__", None) or getattr(item, "__dict__", ()):
                visit(getattr(item, attribute), f"{path}.{attribute}")

    visit(value, name)
    return list(seen.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0}, "memory must be an integer >= 1, got 0"),
        ({"context": 0}, "context must be an integer >= 1, got 0"),
        ({"context": 2**21}, "context 2097152 is beyond the model's 1048576"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer >= 1, got True"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens must be an integer >= 64, got 63"),
        ({"free_memory_floor": 1.5}, r"free_memory_floor must be a share in \[0, 0.9\], got 1.5"),
        ({"free_memory_floor": "6%"}, r"free_memory_floor must be a share in \[0, 0.9\], got '6%'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, got 'int8'"),
    ],
)
def test_bad_values_are_named(full_folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan_capacity(full_folder, **({"memory": 140 * GIB, "context": 1024} | change))
