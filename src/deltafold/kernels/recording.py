"""Finds out what a model launches: runs its steps on tensors without memory and notes each specialisation.

The steps are those of an engine's start (`runner/`), which serving adds none to. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from deltafold.checkpoint.config import ModelConfig, parse_config
from deltafold.kernels.source import kernel_name
from deltafold.kernels.targets import Target
from deltafold.models import model_class
from deltafold.ops import Backend, select
from deltafold.ops.triton import launch
from deltafold.runner.decode_graphs import StepInputs, decode_step, graph_sizes
from deltafold.runner.self_check import check_cases
from deltafold.runner.warm_up import run_step, warm_up_batches, warm_up_caches

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What specialisations depend on: a model, the dtypes it runs in, and the limits of the engine."""

    raw_config: Mapping[str, object]  # config.json
    dtype: torch.dtype
    residual_dtype: torch.dtype
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def config(self) -> ModelConfig:
        return parse_config(self.raw_config)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One specialisation of a kernel; `key` is the one under which Triton keeps it."""

    kernel: JITFunction
    key: str
    options: Any  # the backend's, complete
    given_options: dict[str, object]  # those that the launch gave
    signature: dict[str, str]  # by parameter
    constants: dict[tuple[int, ...], object]  # by position
    attributes: dict[tuple[int, ...], Any]  # by position: known divisibility


class AbsentGpu(GPUDriver):  # type: ignore[misc]  # Triton has no types
    """Tells Triton what to compile for; nothing can be launched."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget("cuda", target.capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return META

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing can be timed without a GPU")

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        raise NotImplementedError("nothing is launched without a GPU")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched without a GPU")

    @classmethod
    def is_active(cls) -> bool:
        return False


def record(shape: ModelShape, target: Target) -> list[Recorded]:
    """Every specialisation that an engine of this shape launches on the target, in order of its first launch."""
    found: dict[tuple[str, str], Recorded] = {}
    binders: dict[JITFunction, Any] = {}

    def note(kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        if kernel not in binders:
            binders[kernel] = kernel.create_binder()
        one = _specialise(kernel, binders[kernel], args, kwargs)
        found.setdefault((kernel_name(kernel), one.key), one)

    with launches_go_to(note, target):
        run_all(shape, META)
    return list(found.values())


def facts_of(target: Target) -> launch.DeviceFacts:
    """As the target's device would give them."""
    return launch.DeviceFacts(
        arch=f"sm_{target.capability}",
        num_multiprocessors=target.num_multiprocessors,
        shared_memory=target.shared_memory,
        has_overlap=target.capability >= 90,
    )


@contextmanager
def launches_go_to(note: Callable[..., None], target: Target) -> Iterator[None]:
    """Inside, launches are noted instead of run, and the ops see the target for the device of every tensor."""
    facts = facts_of(target)
    run, device_facts, active = JITFunction.run, launch.device_facts, driver._active
    JITFunction.run = note
    launch.device_facts = cast(Any, lambda device: facts)
    driver.set_active(AbsentGpu(target))
    try:
        yield
    finally:
        JITFunction.run, launch.device_facts = run, device_facts
        driver.set_active(active)


def _specialise(kernel: JITFunction, binder: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> Recorded:
    """As `JITFunction.run` does before it looks into its cache."""
    kwargs["debug"] = kwargs.get("debug", kernel.debug) or knobs.runtime.debug
    kwargs["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    _, keys, _, backend, bind = binder
    bound, specialization, options = bind(*args, **kwargs)
    key = compute_cache_key(keys, specialization, options)
    given = dict(options)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return Recorded(kernel, key, options, given, signature, constants, attributes)


def condensed(config: ModelConfig) -> ModelConfig:
    """The model with the first layer of every kind and the last layer: equal layers launch the same kernels."""
    kinds = list(zip(config.layer_types, config.mlp_types, strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds} | {len(kinds) - 1})
    return replace(
        config,
        num_hidden_layers=len(kept),
        layer_types=tuple(config.layer_types[i] for i in kept),
        mlp_types=tuple(config.mlp_types[i] for i in kept),
    )


def run_all(shape: ModelShape, device: torch.device) -> None:
    """One step of every kind that an engine's start takes, on tensors of `device`."""
    config, limits = condensed(shape.config), (shape.max_num_batched_tokens, shape.max_num_seqs)
    kind, ops = model_class(config.architecture), select(Backend.TRITON)
    specs = kind.layer_specs(config)
    tensors = {
        key: torch.empty(spec.shape, dtype=spec.dtype or shape.dtype, device=device)
        for key, spec in kind.parameter_table(config).items()
    }
    for _, _, case in check_cases(specs, shape.dtype, device):
        case(ops)
    model = kind(config, tensors, ops, shape.residual_dtype)
    caches = warm_up_caches(specs, shape.dtype, device, shape.max_num_batched_tokens)
    for batch in warm_up_batches(*limits, config.max_position_embeddings, device):
        run_step(model, batch, caches)
    for size in graph_sizes(shape.max_num_seqs):
        slots = size + 1
        inputs = StepInputs.allocate(size, device)
        token_ids = torch.zeros(slots, dtype=torch.int64, device=device)
        tables = torch.zeros(slots, 64, dtype=torch.int32, device=device)
        starts = torch.arange(slots, dtype=torch.int32, device=device)
        decode_step(model, caches, token_ids, tables, starts, inputs)
