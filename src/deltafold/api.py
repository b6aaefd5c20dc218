"""The public surface: an Engine that loads a model and completes prompts. `cli.py`, `server/` and users call this.

Loading resolves every "auto" once; requests go through `intake.py` to the loop's thread and come back as streams.
"""

from __future__ import annotations

import importlib.util
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from deltafold.cache.host_budget import HostBudget
from deltafold.cache.memory import (
    BLOCK_SIZE,
    DeviceMemory,
    LayerSpec,
    MemoryPlan,
    allocate,
    allocated_bytes,
    default_budget,
    device_memory,
    plan_memory,
)
from deltafold.cache.pools import BlockPool, StatePool
from deltafold.cache.prefix_cache import PrefixCache
from deltafold.checkpoint.config import ModelConfig, load_config
from deltafold.checkpoint.fingerprint import fingerprint
from deltafold.checkpoint.folder import resolve_folder
from deltafold.checkpoint.weights import compute_dtype_of, load_tensors, random_tensors, residual_dtype_of
from deltafold.core import EngineCore
from deltafold.errors import CapacityError, DeltafoldError, DeviceError, NumericalError, OptionError, RequestError
from deltafold.intake import Intake
from deltafold.loop import EngineLoop
from deltafold.models import CausalLM, model_class
from deltafold.ops import Backend, Ops, select
from deltafold.progress import loading_bar
from deltafold.runner.decode_graphs import graph_bytes, graph_sizes
from deltafold.runner.runner import ModelRunner
from deltafold.runner.self_check import checked_ops
from deltafold.runner.warm_up import warm_up
from deltafold.scheduler.memory import SchedulerLimits
from deltafold.scheduler.request import Request
from deltafold.scheduler.scheduler import Scheduler
from deltafold.session import Session, SessionServices, restore
from deltafold.streams import AsyncSubscription, AsyncTokenStream, Collector, Subscription, TokenStream
from deltafold.tokenizer.tokenizer import Tokenizer
from deltafold.types import ChatMessage, Completion, EngineOptions, EngineStats, SamplingParams
from deltafold.version import __version__

if TYPE_CHECKING:
    from deltafold.kernels.load import KernelUse

API_VERSION = 1
"""Grows with every incompatible change of the public names or their signatures; see CHANGELOG.md."""

Prompt = str | Sequence[int]
"""Text, or token ids."""

STEP_KERNELS = frozenset({"delta_step", "low_rank_delta_step"})
"""Ops of a decode step that the self check may have replaced."""

SAVE_BYTES_PER_TOKEN = {"cpu": 1_000_000, "cuda": 150_000}
"""A preempted request is saved rather than recomputed up to this many bytes a token: what memory moves both ways in
the time a token's prefill takes (CPU: 5 GB/s against 2,500 tokens/s; H200: 25 GB/s against 80,000 tokens/s)."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Resolved:
    """What `Engine.load` was asked for, with every "auto" decided."""

    model: str
    folder: Path
    device: torch.device
    dtype: torch.dtype
    residual_dtype: torch.dtype
    backend: Backend
    load_seconds: float
    has_random_weights: bool = False
    refused_kernels: tuple[str, ...] = ()
    kernel_use: KernelUse | None = None


class Engine:
    """A loaded model that completes prompts; make one with `Engine.load`, end it with `close()` or a `with` block.

    All methods may be called from any thread; requests of all callers share steps.
    """

    def __init__(
        self, resolved: Resolved, options: EngineOptions, config: ModelConfig, model: CausalLM, tokenizer: Tokenizer
    ) -> None:
        """Not public: use `Engine.load`."""
        self._resolved = resolved
        self._options = options
        self._config = config
        self._tokenizer = tokenizer
        specs = model.layer_specs(config)
        is_fused = _is_fused(resolved.device, resolved.backend)
        # A portable op waits for the device, which no captured step may.
        is_refused = not STEP_KERNELS.isdisjoint(resolved.refused_kernels)
        has_graphs = is_fused and options.decode_graphs and not is_refused
        sizes = graph_sizes(options.max_num_seqs) if has_graphs else ()
        self._device_memory = (
            _measure_device(model, specs, resolved, options, config, has_graphs=has_graphs) if is_fused else None
        )
        self._plan = _plan(specs, resolved, options, config, self._device_memory)
        caches = allocate(self._plan, specs, resolved.dtype, resolved.device)
        self._cache_bytes = allocated_bytes(caches)
        self._blocks = BlockPool(self._plan.num_blocks, BLOCK_SIZE)
        self._slots = StatePool(self._plan.num_state_slots)
        limits = SchedulerLimits(
            max_num_seqs=self._plan.num_slots,
            max_num_batched_tokens=options.max_num_batched_tokens,
            snapshot_interval=options.snapshot_interval,
            save_bytes_per_token=SAVE_BYTES_PER_TOKEN[resolved.device.type],
        )
        self._cache = PrefixCache(
            self._blocks,
            self._slots,
            HostBudget(options.host_memory),
            max_snapshots=self._plan.num_snapshot_slots,
            bytes_per_slot=self._plan.bytes_per_slot,
            bytes_per_block=self._plan.bytes_per_block,
            is_enabled=options.prefix_cache,
        )
        self._core = EngineCore(
            Scheduler(limits, self._blocks, self._slots, self._cache),
            ModelRunner(
                model,
                caches,
                resolved.device,
                num_slots=self._plan.num_state_slots,
                max_blocks=-(-self._plan.max_model_len // BLOCK_SIZE),
                graph_sizes=[size for size in sizes if size <= self._plan.num_slots],
            ),
            lambda request: tokenizer.detokenizer(stop=request.params.stop, prompt_token_ids=request.prompt_token_ids),
            runs_ahead=is_fused,
        )
        self._intake = Intake(
            vocab_size=config.vocab_size,
            max_model_len=self._plan.max_model_len,
            end_token_ids=frozenset(config.eos_token_ids) | tokenizer.end_token_ids,
            seed=options.seed,
            foreign_token_ids=dict(config.foreign_token_ids),
        )
        self._loop = EngineLoop(self._core, max_waiting=options.max_waiting, read_stats=self._read_stats)

    @classmethod
    def load(
        cls,
        model: str | Path = "builtin",
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        residual_dtype: Literal["float32", "bfloat16"] = "float32",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        max_waiting: int | None = None,
        memory: int | None = None,
        seed: int | None = None,
        prefix_cache: bool = True,
        max_snapshots: int = 64,
        snapshot_interval: int = 4096,
        host_memory: int = 2**30,
        decode_graphs: bool = True,
        free_memory_floor: float = 0.06,
        weights: Literal["checkpoint", "random"] = "checkpoint",
        backend: Literal["reference", "portable", "triton"] | None = None,
        kernel_pack: str | Path | None = None,
        revision: str | None = None,
        show_progress: bool | None = None,
    ) -> Engine:
        """Loads a model and starts the engine.

        Args:
            model: "builtin", a folder with config.json and safetensors, or a hub id.
            device: "auto" takes a CUDA device if there is one. "cpu" never looks for one.
            dtype: of weights and activations; "auto" is float32 on the CPU, the checkpoint's own elsewhere.
            residual_dtype: of the stream the layers add to.
            max_num_seqs, max_num_batched_tokens, max_model_len, max_waiting, memory, seed, prefix_cache, max_snapshots,
                snapshot_interval, host_memory, decode_graphs, free_memory_floor: see `EngineOptions`.
            weights: "random" reads none and draws them on the device, for benchmarks: the model's folder then needs
                only config.json and a tokenizer.
            backend: which implementation of the ops; None is "triton" on a GPU that has Triton, else "portable".
            kernel_pack: what `build_kernels` wrote for this model and GPU; without it Triton compiles at start.
            revision: of a hub id.
            show_progress: a bar on stderr while weights load; None shows it on a terminal.

        Raises:
            OptionError: an argument's value, with what is allowed.
            DeviceError: the device asked for is not there; before any file is read.
            LoadError: the model cannot be loaded.
            KernelPackError: the pack is damaged, or was built for other kernels, another GPU or model.
            CapacityError: the memory does not hold one request.
        """
        start = time.perf_counter()
        if not isinstance(model, str | Path):
            raise OptionError(f"model must be a string or a path, got {model!r}")
        model = str(model)
        torch_device = _resolve_device(device)
        _choice("weights", weights, ["checkpoint", "random"])
        backend_name = _resolve_backend(backend, torch_device)
        residual = residual_dtype_of(residual_dtype)
        compute_dtype_of(dtype, None, "cpu")  # an unknown one is refused before anything is read
        options = EngineOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            memory=memory,
            seed=seed,
            prefix_cache=prefix_cache,
            max_snapshots=max_snapshots,
            snapshot_interval=snapshot_interval,
            host_memory=host_memory,
            decode_graphs=decode_graphs,
            free_memory_floor=free_memory_floor,
        )
        folder = resolve_folder(model, revision)
        config = load_config(folder)
        kind = model_class(config.architecture)
        tokenizer = Tokenizer.from_folder(folder, vocab_size=config.vocab_size)
        torch_dtype = compute_dtype_of(dtype, config.dtype, torch_device.type)
        ops = _select_ops(backend_name)
        is_fused = _is_fused(torch_device, backend_name)
        if kernel_pack is not None and not is_fused:
            raise OptionError(
                f"kernel_pack is for the triton backend on a GPU, this is {backend_name} on {torch_device.type}"
            )
        use = _prepare_kernels(kernel_pack, config, torch_dtype, residual, torch_device) if is_fused else None
        table = kind.parameter_table(config)
        if weights == "random":
            tensors = random_tensors(table, compute_dtype=torch_dtype, device=torch_device, seed=seed or 0)
        else:
            with loading_bar(show_progress) as on_progress:
                tensors = load_tensors(
                    folder,
                    table,
                    compute_dtype=torch_dtype,
                    device=torch_device,
                    on_progress=on_progress,
                    ignore=kind.ignored_tensors,
                )
        refused: list[str] = []
        if is_fused:
            ops, refused = checked_ops(ops, kind.layer_specs(config), torch_dtype, torch_device)
        loaded = kind(config, tensors, ops, residual)
        seconds = time.perf_counter() - start
        resolved = Resolved(
            model,
            folder,
            torch_device,
            torch_dtype,
            residual,
            backend_name,
            seconds,
            weights == "random",
            tuple(refused),
            use,
        )
        return cls(resolved, options, config, loaded, tokenizer)

    @overload
    def complete(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload that fits wins
        self, prompt: str, params: SamplingParams | None = None
    ) -> Completion: ...
    @overload
    def complete(self, prompt: Sequence[str], params: SamplingParams | None = None) -> list[Completion]: ...
    def complete(
        self, prompt: str | Sequence[str], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Completes text. One string gives one Completion (`params.n` must be 1); a list of strings a flat list,
        prompt by prompt, `params.n` completions each.

        Raises:
            RequestError, QueueFullError, EngineClosedError: nothing was computed.
            NumericalError: a request's logits were not finite; its `completions` has what all requests produced.
        """
        if isinstance(prompt, str):
            return self.complete_tokens(self.encode(prompt), params)
        for item in _as_sequence(prompt):
            if not isinstance(item, str):
                raise RequestError(f"complete takes strings, got {item!r}; token ids go to complete_tokens")
        return self.complete_tokens([self.encode(text) for text in prompt], params)

    @overload
    def complete_tokens(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Completion: ...
    @overload
    def complete_tokens(
        self, token_ids: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[Completion]: ...
    def complete_tokens(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Completes token ids: one prompt, or a list of prompts; otherwise as `complete`."""
        params = _checked(params)
        prompts = [ids for ids in _as_sequence(token_ids) if isinstance(ids, Sequence)]
        for ids in (token_ids, *prompts):
            if isinstance(ids, str | bytes):
                raise RequestError(f"complete_tokens takes token ids, got {ids!r}; text goes to complete")
        if prompts and len(prompts) == len(token_ids):
            return self._complete(prompts, params)
        _check_single(params)
        return self._complete([token_ids], params)[0]  # type: ignore[list-item]  # ids are checked one by one

    def chat(self, messages: Sequence[ChatMessage], params: SamplingParams | None = None) -> Completion:
        """Answers a conversation, rendered by the model's chat template; otherwise as `complete`."""
        return self.complete_tokens(self.chat_token_ids(messages), params)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> TokenStream:
        """Completes one prompt and yields increments as they come; with `n > 1` those of all completions, mixed.

        The request is checked and queued by the call itself. Closing or dropping the stream aborts it.
        """
        return TokenStream(self._loop, self._requests([prompt], params, request_id))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncTokenStream:
        """`stream` for `async for`; to be called in a running event loop."""
        return AsyncTokenStream(self._loop, self._requests([prompt], params, request_id))

    async def acomplete(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> list[Completion]:
        """`complete` of a list of prompts for coroutines. Cancelling it aborts the requests."""
        params = _checked(params)
        if isinstance(prompts, str):
            raise RequestError(f"acomplete takes a list of prompts, got {prompts!r}")
        requests = self._requests(_as_sequence(prompts), params, request_id)
        collector = Collector(requests)
        subscription = AsyncSubscription(self._loop, requests)
        try:
            while not subscription.is_finished:
                collector.add(await subscription.get())
        finally:
            subscription.abort()
        return _raise_errors(collector.completions(params.n))

    def session(self) -> Session:
        """A conversation whose state outlives its requests: each call computes only what is new."""
        return Session(self._session_services())

    def restore(self, path: str | Path) -> Session:
        """A session from the file that `Session.save` wrote, on an engine with the same model and dtype.

        Raises:
            SessionError: the file is damaged, or of another format, model or dtype; the message names the field.
        """
        return restore(self._session_services(), path)

    def fork(self, session: Session) -> Session:
        """A second session with the same past; the two share memory, and neither changes the other.

        Raises:
            RequestError: the session is another engine's, or its last stream is not finished.
        """
        if session.services.loop is not self._loop:
            raise RequestError("the session belongs to another engine; save it there and restore it here")
        return session.fork()

    def abort(self, request_id: str) -> bool:
        """Ends all completions of a request before the next step; false if none is unfinished."""
        return self._loop.abort(request_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; never a control token."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; InvalidTokenError for an id outside the vocabulary."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; InvalidTokenError for an id outside the vocabulary."""
        return self._tokenizer.token_bytes(token_id)

    def chat_token_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ChatMessage] | None = None,
    ) -> list[int]:
        """The prompt the chat template makes of messages; control tokens come from the template alone."""
        return self._tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def describe(self) -> dict[str, Any]:
        """What was loaded and what it was resolved to: plain values, ready for `json.dumps`."""
        resolved, plan = self._resolved, self._plan
        return {
            "deltafold": __version__,
            "api_version": API_VERSION,
            "model": {
                "name": resolved.model,
                "architecture": self._config.architecture,
                "num_hidden_layers": self._config.num_hidden_layers,
                "vocab_size": self._config.vocab_size,
                "fingerprint": self._fingerprint,
                "load_seconds": round(resolved.load_seconds, 3),
            },
            "device": str(resolved.device),
            "dtype": _dtype_name(resolved.dtype),
            "residual_dtype": _dtype_name(resolved.residual_dtype),
            "backend": str(resolved.backend),
            "limits": {
                "max_model_len": plan.max_model_len,
                "max_num_seqs": plan.num_slots,
                "max_num_batched_tokens": self._options.max_num_batched_tokens,
                "max_waiting": self._options.max_waiting,
            },
            "prefix_cache": {
                "is_enabled": self._options.prefix_cache,
                "max_snapshots": plan.num_snapshot_slots,
                "snapshot_interval": self._options.snapshot_interval,
                "host_memory": self._options.host_memory,
                "save_bytes_per_token": SAVE_BYTES_PER_TOKEN[self._resolved.device.type],
            },
            "memory": _describe_memory(plan, self._cache_bytes, self._device_memory),
            "kernels": None if resolved.kernel_use is None else resolved.kernel_use.describe(),
            "refused_kernels": list(resolved.refused_kernels),
            "decode_graphs": list(self._core.runner.graph_sizes),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }

    def stats(self) -> EngineStats:
        """Load and counters as of now."""
        return self._loop.stats()

    @property
    def model_name(self) -> str:
        """The `model` it was loaded with."""
        return self._resolved.model

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and output together, of one request."""
        return self._plan.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: false once closed, or once a step raised."""
        return self._loop.is_alive

    def close(self) -> None:
        """Stops after the current step; unfinished requests get an EngineClosedError. Idempotent."""
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _session_services(self) -> SessionServices:
        return SessionServices(
            loop=self._loop,
            core=self._core,
            tokenizer=self._tokenizer,
            make_request=lambda token_ids, params: self._intake.make([token_ids], params)[0],
            identity=lambda: {"fingerprint": self._fingerprint, "dtype": _dtype_name(self._resolved.dtype)},
        )

    @cached_property
    def _fingerprint(self) -> str:
        if self._resolved.has_random_weights:
            return f"random weights, seed {self._options.seed or 0}"
        return fingerprint(self._resolved.folder)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | None, request_id: str | None
    ) -> list[Request]:
        ids = [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return self._intake.make(ids, _checked(params), request_id)

    def _complete(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        requests = self._requests(prompts, params, None)
        collector = Collector(requests)
        subscription = Subscription(self._loop, requests)
        try:
            while not subscription.is_finished:
                collector.add(subscription.get())
        finally:
            subscription.abort()
        return _raise_errors(collector.completions(params.n))

    def _read_stats(self) -> EngineStats:
        core, scheduler = self._core, self._core.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=self._blocks.total,
            num_free_blocks=self._blocks.num_free,
            num_cached_blocks=self._blocks.num_cached,
            num_state_slots=self._slots.total,
            num_free_state_slots=self._slots.num_free,
            num_cached_state_slots=self._cache.num_slots_of_snapshots,
            num_snapshots=self._cache.num_snapshots,
            num_preemptions=scheduler.num_preemptions,
            num_saved_preemptions=scheduler.num_saved_preemptions,
            num_host_bytes=self._cache.host.num_bytes,
            num_prompt_tokens=core.num_prompt_tokens,
            num_output_tokens=core.num_output_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_steps=core.num_steps,
        )


def _resolve_device(device: str) -> torch.device:
    _choice("device", device, ["auto", "cpu", "cuda"])
    if device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if device == "cuda":
        raise DeviceError("device 'cuda' was asked for, and this torch finds no CUDA device")
    return torch.device("cpu")


def _resolve_backend(backend: str | None, device: torch.device) -> Backend:
    if backend is not None:
        return Backend(_choice("backend", backend, list(Backend)))
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return Backend.TRITON if has_triton else Backend.PORTABLE


def _is_fused(device: torch.device, backend: Backend) -> bool:
    """Whether no op waits for the device: what graphs, packs and running ahead need."""
    return device.type == "cuda" and backend is Backend.TRITON


def _prepare_kernels(
    pack: str | Path | None,
    config: ModelConfig,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    device: torch.device,
) -> KernelUse:
    """Puts the pack's kernels in place, if there is one, and counts from here on what else is compiled."""
    from deltafold.kernels.load import KernelUse, use_pack  # needs triton

    if pack is not None:
        use_pack(Path(pack), config, (dtype, residual_dtype), device)
    return KernelUse(device, None if pack is None else Path(pack))


def _measure_device(
    model: CausalLM,
    specs: Sequence[LayerSpec],
    resolved: Resolved,
    options: EngineOptions,
    config: ModelConfig,
    *,
    has_graphs: bool,
) -> DeviceMemory:
    """Runs the model once at every kind of shape, and says what memory that leaves."""
    peak = warm_up(
        model,
        specs,
        resolved.dtype,
        resolved.device,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len or config.max_position_embeddings,
    )
    graphs = graph_bytes(options.max_num_seqs, config.vocab_size) if has_graphs else 0
    return device_memory(resolved.device, activations=peak, graphs=graphs, floor_share=options.free_memory_floor)


def _plan(
    specs: Sequence[LayerSpec],
    resolved: Resolved,
    options: EngineOptions,
    config: ModelConfig,
    device: DeviceMemory | None,
) -> MemoryPlan:
    if device is None:
        budget = options.memory if options.memory is not None else default_budget(resolved.device)
    else:
        budget = device.budget if options.memory is None else options.memory
        if budget > device.budget or budget <= 0:
            wanted = "nothing" if options.memory is None else f"memory={budget}"
            raise CapacityError(f"{wanted} fits: {device}, which leaves {device.budget} bytes")
    return plan_memory(
        specs,
        resolved.dtype,
        budget=budget,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        model_limit=config.max_position_embeddings,
        max_snapshots=options.max_snapshots if options.prefix_cache else 0,
    )


def _select_ops(backend: Backend) -> Ops:
    try:
        return select(backend)
    except ImportError as error:
        raise OptionError(f"backend {str(backend)!r} needs {error.name}, which is not installed") from error


def _choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {params!r}")
    return params


def _as_sequence(prompts: Sequence[_Item]) -> Sequence[_Item]:
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be text, a list of texts or lists of token ids, got {prompts!r}")
    return prompts


def _check_single(params: SamplingParams) -> None:
    if params.n != 1:
        raise RequestError(f"n={params.n} gives several completions: pass a list of prompts", param="n")


def _raise_errors(completions: list[Completion]) -> list[Completion]:
    for completion in completions:
        if isinstance(completion.error, NumericalError):
            raise NumericalError(str(completion.error), completions=completions)
        if isinstance(completion.error, DeltafoldError):
            raise completion.error
    return completions


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_memory(plan: MemoryPlan, cache_bytes: int, device: DeviceMemory | None) -> dict[str, Any]:
    return {
        "device": asdict(device) if device is not None else None,
        **asdict(plan),
        "planned_bytes": plan.num_bytes,
        "allocated_bytes": cache_bytes,
        "block_size": BLOCK_SIZE,
        "num_cache_tokens": plan.num_cache_tokens,
    }
