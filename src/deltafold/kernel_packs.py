"""Kernels ahead of time as public functions: packs for `Engine.load(kernel_pack=...)`, and tuning.

They need Triton, which is imported when they are called; `kernels/` does the work.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from deltafold.checkpoint.config import parse_config
from deltafold.checkpoint.folder import read_json_object, resolve_folder
from deltafold.checkpoint.weights import compute_dtype_of, residual_dtype_of
from deltafold.errors import ConfigError, OptionError
from deltafold.kernels.targets import published_config
from deltafold.types import EngineOptions

if TYPE_CHECKING:
    from deltafold.kernels.build import PackSummary
    from deltafold.kernels.check import KernelDrift
    from deltafold.kernels.tune import Tuned


def build_kernels(
    output: str | Path,
    *,
    arch: Sequence[str],
    model_shape: str | None = None,
    model: str | Path | None = None,
    revision: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    residual_dtype: Literal["float32", "bfloat16"] = "float32",
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 8192,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> PackSummary:
    """Compiles all that a model launches on GPUs that need not be there, and writes it to `output`.

    Args:
        arch: of the GPUs, among sm_90 and sm_121a.
        model_shape: a published model by name (kimi-linear-48b); or instead
        model, revision: a folder with config.json, "builtin", or a hub id.
        dtype, residual_dtype, max_num_seqs, max_num_batched_tokens: as the engines that load the pack will have them;
            one with other limits may have to compile a few kernels of its own.
        on_progress: called with the architecture, the number of kernels compiled so far and the number to compile.

    Raises:
        OptionError: an argument's value, with what is allowed; or Triton is not installed.
        LoadError: the model's configuration cannot be read.
        KernelPackError: a kernel cannot be packed; nothing is written.
    """
    if (model is None) == (model_shape is None):
        raise OptionError(f"give either model_shape or model, got {model_shape!r} and {model!r}")
    if not arch:
        raise OptionError("arch is empty: name at least one architecture")
    EngineOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)  # refuses bad values
    compute_dtype_of(dtype, None, "cuda")
    residual = residual_dtype_of(residual_dtype)
    path = Path(output)
    if not path.absolute().parent.is_dir():
        raise OptionError(f"output {path}: there is no folder {path.absolute().parent}")
    raw = published_config(model_shape) if model_shape is not None else _config_of(str(model), revision)
    config = parse_config(raw)
    _check_triton()
    from deltafold.kernels.build import build_pack
    from deltafold.kernels.recording import ModelShape

    shape = ModelShape(
        raw, compute_dtype_of(dtype, config.dtype, "cuda"), residual, max_num_seqs, max_num_batched_tokens
    )
    return build_pack(shape, list(dict.fromkeys(arch)), path, on_progress)


def check_kernels(pack: str | Path) -> KernelDrift:
    """What differs between a pack and the kernels, pins and launches of this version; needs no GPU.

    Raises:
        OptionError: Triton is not installed.
        KernelPackError: the pack cannot be read.
    """
    _check_triton()
    from deltafold.kernels.check import check_pack

    return check_pack(Path(pack))


def tune_kernels(kernels: Sequence[str], output: str | Path | None = None) -> list[Tuned]:
    """Measures launch configurations on this machine's GPU and writes the best into the tables of pins.

    Args:
        kernels: tables by name, such as mla_decode; an unknown name is answered with all of them.
        output: the folder for the tables' files; None is the package's own.

    Raises:
        OptionError: there is no such table or folder; or Triton is not installed.
        DeviceError: there is no GPU.
    """
    folder = Path(str(files("deltafold") / "ops" / "triton" / "pins")) if output is None else Path(output)
    if not folder.is_dir():
        raise OptionError(f"output {folder}: there is no such folder")
    _check_triton()
    from deltafold.kernels.tune import tune_table

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [tuned for kernel in dict.fromkeys(kernels) for tuned in tune_table(kernel, device, folder)]


def _config_of(model: str, revision: str | None) -> dict[str, object]:
    return read_json_object(resolve_folder(model, revision) / "config.json", ConfigError)


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise OptionError("kernel packs need triton, which is not installed")
