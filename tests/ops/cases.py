"""Calls of every op, on any backend and device: odd shapes, fused projections, poisoned pools, padded requests.

`cases_of(op)` generates; `check_case` runs one on a backend and holds it to `ops/reference.py`. Pools are NaN
(0xFF bytes) wherever the call may not read, and padded rows of the inputs are NaN too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deltafold.ops import PAD_SLOT, Backend, Ops, reference, select

F32, BF16 = torch.float32, torch.bfloat16
PAD = None
"""In a list of request lengths or slots: a padded request."""


def backend_params() -> list[object]:
    """(backend, device) pairs to test: the portable one, and the Triton one where it can run."""
    params: list[object] = [
        pytest.param("portable", "cpu", id="portable-cpu"),
        pytest.param("portable", "cuda", id="portable-cuda", marks=pytest.mark.gpu),
    ]
    spec = importlib.util.find_spec("deltafold.ops.triton")
    if spec is not None and spec.origin is not None:
        params.append(pytest.param("triton", "cuda", id="triton-cuda", marks=pytest.mark.gpu))
        if os.environ.get("TRITON_INTERPRET") == "1":
            params.append(pytest.param("triton", "cpu", id="triton-interpreted"))
    return params


on_backends = pytest.mark.parametrize(("backend", "device"), backend_params())

# Largest error, relative to the root mean square of what is expected; the mean error may be a quarter of it.
TOLERANCE = {
    (Backend.PORTABLE, F32): 2e-5,
    (Backend.PORTABLE, BF16): 4e-2,
    (Backend.TRITON, F32): 2e-3,
    (Backend.TRITON, BF16): 6e-2,  # 1.5 roundings of an element ten times the root mean square
}


@dataclass(frozen=True)
class Case:
    """One call. `written` are the positions of arguments changed in place; of these, only rows `owned` (along the
    first axis, or along the first two flattened if `is_paged`) may change. `dtype` chooses the tolerance."""

    op: str
    name: str
    args: tuple[object, ...]
    dtype: torch.dtype = F32
    written: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    is_paged: bool = False


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(gen: torch.Generator, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=gen).to(dtype)


def fused(gen: torch.Generator, T: int, widths: list[int], dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
    """Slices of one projection's output, [T, width] each: what layers pass, never contiguous."""
    return torch.split(randn(gen, T, sum(widths) + 3, dtype=dtype), [*widths, 3], dim=-1)[:-1]


def poisoned(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Memory full of 0xFF bytes, which is NaN in every float format."""
    pool = torch.empty(*shape, dtype=dtype)
    pool.view(torch.uint8).fill_(0xFF)
    return pool


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def kda_gate(gen: torch.Generator, T: int, HV: int, K: int) -> Tensor:
    """Log decays as a freshly initialised model has them, [T, HV, K]."""
    A_log, dt_bias = gate_parameters(gen, HV, K)
    return reference.decay_gate(randn(gen, T, HV, K), A_log, dt_bias)


def gdn_gate(gen: torch.Generator, T: int, HV: int) -> Tensor:
    """The same with one gate a head, [T, HV]."""
    A_log, dt_bias = gate_parameters(gen, HV, 1)
    return reference.decay_gate(randn(gen, T, HV), A_log, dt_bias[:, 0])


def gate_parameters(gen: torch.Generator, HV: int, K: int) -> tuple[Tensor, Tensor]:
    """A_log [HV] = log U(1, 16) and dt_bias [HV, K] = softplus^-1 of a log-uniform step in [1e-3, 1e-1]."""
    A_log = torch.empty(HV).uniform_(1, 16, generator=gen).log()
    step = torch.empty(HV, K).uniform_(-6.9078, -2.3026, generator=gen).exp()
    return A_log, step + torch.log(-torch.expm1(-step))


# --- running and judging -------------------------------------------------------------------------------------------


def move(value: object, device: str) -> object:
    """A copy on `device`; a view stays a view with the same strides."""
    if not isinstance(value, Tensor):
        return value
    base = value if value._base is None else value._base
    return base.clone().to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def bits(x: Tensor) -> Tensor:
    """Raw bytes, so that NaNs compare."""
    return x.cpu().flatten().clone().view(torch.uint8)


def as_tuple(result: object) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Same shape and dtype, finite, and near; integers equal. See TOLERANCE."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    assert bool(expected.isfinite().all()), f"{what}: the case itself is not finite"
    assert bool(actual.isfinite().all()), f"{what}: not finite"
    if not expected.numel():
        return
    error = (actual.double() - expected.double()).abs()
    scale = expected.double().square().mean().sqrt().item()
    assert error.max().item() <= tolerance * scale, f"{what}: max error {error.max().item()} at scale {scale}"
    assert error.square().mean().sqrt().item() <= tolerance * scale / 4, f"{what}: mean error at scale {scale}"


def check_case(case: Case, backend: str, device: str) -> None:
    """Runs `case` on the backend and on the reference; raises AssertionError on any difference that matters."""
    expected_args = tuple(move(value, "cpu") for value in case.args)
    expected = as_tuple(getattr(reference, case.op)(*expected_args))
    args = tuple(move(value, device) for value in case.args)
    results = as_tuple(getattr(select(backend), case.op)(*args))
    tolerance = TOLERANCE[Backend(backend), case.dtype]
    if backend == Backend.TRITON and device == "cpu" and case.dtype == BF16:
        tolerance *= 3  # the interpreter truncates to bfloat16, at every step, where a GPU rounds
    assert len(results) == len(expected)
    for i, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
        assert_near(actual, wanted, tolerance, f"{case.op} {case.name}, result {i}")
        assert actual.device.type == device
    for i, value in enumerate(case.args):
        if not isinstance(value, Tensor):
            continue
        if i not in case.written:
            assert torch.equal(bits(args[i]), bits(value)), f"{case.op} {case.name}: argument {i} was changed"
            continue
        check_written(case, i, args[i], expected_args[i], tolerance)


def check_written(case: Case, i: int, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Owned rows as the reference writes them, all others bit for bit as they were."""
    before = case.args[i]
    assert isinstance(before, Tensor)
    rows = [x.flatten(0, 1) if case.is_paged else x for x in (before, actual.cpu(), expected)]
    owned = list(case.owned)
    others = [row for row in range(rows[0].shape[0]) if row not in owned]
    what = f"{case.op} {case.name}, argument {i}"
    assert torch.equal(bits(rows[1][others]), bits(rows[0][others])), f"{what}: wrote where it may not"
    assert_near(rows[1][owned], rows[2][owned], tolerance, what)


def assert_bit_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert torch.equal(bits(actual), bits(expected)), what


# --- state pools ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    """The request side of a state op's call."""

    lengths: list[int]
    slots: list[int]  # PAD_SLOT for padding
    has_state: list[bool]
    num_slots: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def owned(self) -> tuple[int, ...]:
        return tuple(slot for slot in self.slots if slot != PAD_SLOT)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            starts_of(self.lengths),
            torch.tensor(self.slots, dtype=torch.int32),
            torch.tensor(self.has_state, dtype=torch.bool),
        )

    def pool(self, gen: torch.Generator, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """A poisoned pool in which only the states that may be read hold numbers."""
        pool = poisoned(self.num_slots, *shape, dtype=dtype)
        for slot, has_state in zip(self.slots, self.has_state, strict=True):
            if has_state and slot != PAD_SLOT:
                pool[slot] = randn(gen, *shape, dtype=dtype)
        return pool

    def poison_padding(self, *tensors: Tensor) -> None:
        """NaN into the token rows of padded requests."""
        starts = starts_of(self.lengths).tolist()
        for i, slot in enumerate(self.slots):
            if slot == PAD_SLOT:
                for x in tensors:
                    x[starts[i] : starts[i + 1]] = torch.nan


REQUESTS = {
    "one_fresh": Requests([5], [0], [False], 1),
    "one_continued": Requests([7], [2], [True], 4),
    "one_token_fresh": Requests([1], [1], [False], 3),
    "one_token": Requests([1], [1], [True], 3),
    "two_tokens_continued": Requests([2], [0], [True], 2),
    "decode": Requests([1, 1, 1], [1, 2, 3], [True, True, True], 5),
    "decode_scattered": Requests([1, 1, 1], [4, 0, 2], [True, True, True], 5),
    "decode_one_fresh": Requests([1, 1, 1], [4, 0, 2], [True, False, True], 5),
    "decode_padded": Requests([1, 1, 1, 1], [3, PAD_SLOT, 1, PAD_SLOT], [True, True, True, False], 5),
    "all_padded": Requests([1, 1], [PAD_SLOT, PAD_SLOT], [True, False], 2),
    "one_of_two_tokens": Requests([2, 0], [0, 1], [True, True], 3),
    "packed": Requests([3, 1, 6, 2], [5, 0, 3, 2], [False, True, True, False], 7),
    "packed_empty": Requests([4, 0, 0, 2], [1, 3, 0, 4], [True, True, False, False], 5),
    "packed_padded": Requests([1, 3, 2, 5], [0, PAD_SLOT, 4, 2], [True, True, False, True], 5),
    "mixed_chunks": Requests([65, 1, 64, 130], [2, 0, 3, 1], [True, True, False, True], 6),
}


def conv_cases() -> Iterator[Case]:
    for seed, (name, requests) in enumerate(REQUESTS.items()):
        for W, D, dtype in ((4, 40, F32), (2, 7, F32), (4, 24, BF16)):
            if name == "mixed_chunks" and W != 4:
                continue
            gen = generator(seed)
            (x, _) = fused(gen, requests.num_tokens, [D, 5], dtype)
            requests.poison_padding(x)
            weight = (torch.rand(D, W, generator=gen) - 0.5).to(dtype)
            pool = requests.pool(gen, D, W - 1, dtype=dtype)
            args = (x, weight, pool, *requests.tensors())
            yield Case("causal_conv", f"{name} W={W} {dtype}", args, dtype, (2,), requests.owned)


def gate_cases() -> Iterator[Case]:
    for T, HV, K in ((1, 4, 16), (5, 3, 24)):
        gen = generator(T)
        A_log, dt_bias = gate_parameters(gen, HV, K)
        for dtype in (F32, BF16):
            (raw, _) = fused(gen, T, [HV * K, 4], dtype)
            raw = raw.unflatten(-1, (HV, K))
            yield Case("decay_gate", f"kda T={T} {dtype}", (raw, A_log, dt_bias))
            yield Case("decay_gate", f"kda wide T={T} {dtype}", (raw * 30, A_log, dt_bias))
            yield Case("decay_gate", f"gdn T={T} {dtype}", (raw[..., 0], A_log, dt_bias[:, 0].contiguous()))


def delta_args(
    requests: Requests, seed: int, heads: tuple[int, int, int, int], is_kda: bool, dtype: torch.dtype = F32
) -> tuple[Tensor, ...]:
    """Arguments of the delta rules; heads = (H, HV, K, V)."""
    gen = generator(seed)
    H, HV, K, V = heads
    T = requests.num_tokens
    q, k, v = fused(gen, T, [H * K, H * K, HV * V], dtype)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    g = kda_gate(gen, T, HV, K) if is_kda else gdn_gate(gen, T, HV)
    beta = torch.sigmoid(randn(gen, T, HV))
    requests.poison_padding(q, k, v, g, beta)
    return (q, k, v, g, beta, requests.pool(gen, HV, K, V), *requests.tensors())


def delta_cases(op: str) -> Iterator[Case]:
    shapes = ((2, 2, 16, 16), (1, 2, 16, 32), (2, 4, 32, 16))
    for seed, (name, requests) in enumerate(REQUESTS.items()):
        for is_kda in (True, False):
            heads = shapes[(seed + is_kda) % 3]
            for dtype in (F32, BF16) if seed % 3 == 0 else (F32,):
                args = delta_args(requests, seed, heads, is_kda, dtype)
                label = f"{name} {'kda' if is_kda else 'gdn'} {heads} {dtype}"
                yield Case(op, label, args, dtype, (5,), requests.owned)


def raw_delta_args(
    requests: Requests, seed: int, heads: tuple[int, int, int, int], is_kda: bool, dtype: torch.dtype = F32
) -> tuple[Tensor, ...]:
    """Arguments of `delta_prefill`: those of the delta rules, gate and beta before their nonlinearity."""
    q, k, v, _, _, *state = delta_args(requests, seed, heads, is_kda, dtype)
    gen = generator(100 + seed)
    _, HV, K, _ = heads
    A_log, dt_bias = gate_parameters(gen, HV, K if is_kda else 1)
    raw, logits = fused(gen, requests.num_tokens, [HV * K if is_kda else HV, HV], dtype)
    requests.poison_padding(raw, logits)
    if is_kda:
        return (q, k, v, raw.unflatten(-1, (HV, K)), logits, A_log, dt_bias, *state)
    return (q, k, v, raw, logits, A_log, dt_bias[:, 0].contiguous(), *state)


def delta_prefill_cases() -> Iterator[Case]:
    for seed, name in enumerate(("one_continued", "packed", "packed_empty", "packed_padded", "mixed_chunks")):
        requests = REQUESTS[name]
        for is_kda in (True, False):
            dtype = BF16 if name == "packed_padded" else F32
            args = raw_delta_args(requests, seed, (1, 2, 16, 32) if is_kda else (2, 2, 32, 16), is_kda, dtype)
            label = f"{name} {'kda' if is_kda else 'gdn'} {dtype}"
            yield Case("delta_prefill", label, args, dtype, (7,), requests.owned)


def delta_step_cases() -> Iterator[Case]:
    steps = [(name, requests) for name, requests in REQUESTS.items() if set(requests.lengths) == {1}]
    for seed, (name, requests) in enumerate(steps):
        H, HV, K, V = ((2, 2, 16, 16), (1, 2, 16, 32), (2, 4, 32, 16))[seed % 3]
        D, W, is_kda, dtype = 2 * H * K + HV * V, 4 - seed % 2, seed % 3 != 1, BF16 if seed % 3 == 2 else F32
        args = raw_delta_args(requests, seed, (H, HV, K, V), is_kda, dtype)
        gen = generator(seed)
        qkv, out_gate = fused(gen, requests.num_tokens, [D, HV * V], dtype)
        requests.poison_padding(qkv, out_gate)
        weight = (torch.rand(D, W, generator=gen) - 0.5).to(dtype)
        yield Case(
            "delta_step",
            f"{name} {(H, HV, K, V)} W={W} {dtype}",
            (
                *(qkv, weight, requests.pool(gen, D, W - 1, dtype=dtype), *args[3:7], out_gate.unflatten(-1, (HV, V))),
                *(randn(gen, V, dtype=dtype), 1e-5, ("sigmoid", "silu")[seed % 2], args[7], *args[9:]),
            ),
            dtype,
            (2, 11),
            requests.owned,
        )


def low_rank_step_cases() -> Iterator[Case]:
    """`delta_step`'s with a decay a channel, their gates in two factors."""
    for seed, case in enumerate(case for case in delta_step_cases() if case.args[3].dim() == 3):
        qkv, weight, taps, raw, logits, A_log, dt_bias, out_gate, *rest = case.args
        gen = generator(50 + seed)
        low = []
        for gate, rank in ((raw, 8 + 12 * seed), (out_gate, 20 - 3 * seed)):
            up = randn(gen, gate[0].numel(), rank, dtype=case.dtype) * 0.5 * rank**-0.5
            rows = fused(gen, qkv.shape[0], [rank, 5], case.dtype)[0]
            rows[raw.flatten(1)[:, 0].isnan()] = float("nan")  # padded rows
            low += [rows, up]
        if case.dtype == BF16:  # silu has outputs so far from the rest that one of their rounding steps is too much
            rest[2] = "sigmoid"
        args = (qkv, weight, taps, *low[:2], logits, A_log, dt_bias, *low[2:], *rest)
        yield Case("low_rank_delta_step", f"{case.name} ranks {low[1].shape[1]} {low[3].shape[1]}", args, case.dtype,
                   (2, 13), case.owned)  # fmt: skip


def greedy_cases() -> Iterator[Case]:
    """Ties, rows with NaN or infinities, negative rows, parts of several programs."""
    for N, vocab in ((1, 7), (3, 64), (2, 5000), (5, 9001)):
        logits = randn(generator(vocab), N, vocab) - 10
        logits[:, vocab // 3] = logits[:, vocab - 2] = logits.max() + 1
        logits[N - 1, 0] = -1e30
        yield Case("greedy", f"{N}x{vocab} ties", (fused_rows(logits),), F32)
        logits = logits.clone()
        logits[0, vocab // 2], logits[N - 1, vocab - 1] = float("inf"), float("-inf")
        yield Case("greedy", f"{N}x{vocab} infinities", (logits,), F32)


def fused_rows(x: Tensor) -> Tensor:
    """`x` as the left part of wider rows."""
    return torch.cat([x, torch.full((x.shape[0], 3), float("nan"))], dim=1)[:, : x.shape[1]]


def norm_cases(op: str) -> Iterator[Case]:
    for seed, (shape, dtype, out) in enumerate(
        (((1, 256), F32, F32), ((5, 40), F32, BF16), ((3, 2, 24), BF16, BF16), ((7, 33), BF16, F32))
    ):
        gen = generator(seed)
        D = shape[-1]
        x = fused(gen, shape[0], [shape[1] * D if len(shape) == 3 else D], dtype)[0].reshape(shape) * 0.01
        weight = randn(gen, D, dtype=dtype)
        tolerance_of = BF16 if BF16 in (dtype, out) else F32
        if op == "rms_norm":
            yield Case(op, f"{shape} {dtype} to {out}", (x, weight, 1e-5, out), tolerance_of)
            yield Case(op, f"{shape} {dtype}, float32 weight", (x, weight.float() + 1.003, 1e-5, out), tolerance_of)
            view = fused(gen, shape[0], [D, 5], dtype)[0]
            yield Case(op, f"strided {shape}", (view, weight, 1e-5, out), tolerance_of)
        elif op == "gated_rms_norm":
            gate = fused(gen, shape[0], [x.numel() // shape[0], 2], out)[0].reshape(shape)
            for activation in ("sigmoid", "silu"):
                args = (x, gate, weight, 1e-5, activation)
                yield Case(op, f"{shape} {dtype} {activation} {out}", args, tolerance_of)


def add_norm_cases() -> Iterator[Case]:
    for seed, (T, D, dtype, residual_dtype) in enumerate(
        ((1, 64, F32, F32), (5, 33, BF16, F32), (4, 48, BF16, BF16), (3, 20, F32, BF16))
    ):
        gen = generator(seed)
        residual = randn(gen, T, D, dtype=residual_dtype)
        args = (fused(gen, T, [D])[0].to(dtype), residual, randn(gen, D, dtype=dtype), 1e-6, dtype)
        tolerance_of = BF16 if BF16 in (dtype, residual_dtype) else F32
        yield Case("add_rms_norm", f"{(T, D)} {dtype} {residual_dtype}", args, tolerance_of, (1,), tuple(range(T)))


def silu_cases() -> Iterator[Case]:
    for T, width, dtype in ((1, 16, F32), (5, 23, F32), (6, 32, BF16)):
        gen = generator(T)
        yield Case("silu_and_mul", f"{(T, width)} {dtype}", (3 * randn(gen, T, 2 * width, dtype=dtype),), dtype)
        yield Case("silu_and_mul", f"strided {(T, width)}", (fused(gen, T, [2 * width, 1], dtype)[0],), dtype)


# --- paged latent cache --------------------------------------------------------------------------------------------

FOREIGN_BLOCK = 2**30
"""What a block table holds after a request's own blocks in these cases: an id that must never be followed."""


def latent_context(
    gen: torch.Generator, lengths: list[int], width: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A poisoned cache with contexts of `lengths` in shuffled blocks: (latent_cache, seq_lens, block_table)."""
    (cache,), seq_lens, table = paged_contexts(gen, lengths, [(width,)], block_size, dtype)
    return cache, seq_lens, table


def paged_contexts(
    gen: torch.Generator, lengths: list[int], shapes: list[tuple[int, ...]], block_size: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Poisoned caches, one for each shape of a token's row, with contexts of `lengths` in the same shuffled blocks:
    (caches, seq_lens, block_table)."""
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=gen).tolist()
    caches = [poisoned(len(order), block_size, *shape, dtype=dtype) for shape in shapes]
    table = torch.full((len(lengths), max(counts) + 2), FOREIGN_BLOCK, dtype=torch.int32)
    for i, length in enumerate(lengths):
        for n in range(counts[i]):
            block = order.pop()
            table[i, n] = block
            used = min(block_size, length - n * block_size)
            for cache in caches:
                cache[block, :used] = randn(gen, used, *cache.shape[2:], dtype=dtype)
    return caches, torch.tensor(lengths, dtype=torch.int32), table


def store_cases() -> Iterator[Case]:
    for slots, block_size, R, P, dtype in (
        ([5], 4, 16, 8, F32),
        ([PAD_SLOT], 4, 16, 8, F32),
        ([9, 0, 3], 16, 24, 8, F32),
        ([7, PAD_SLOT, 11, PAD_SLOT, 2], 4, 7, 3, BF16),
    ):
        gen = generator(len(slots))
        (_, kv_c, k_pe) = fused(gen, len(slots), [2, R, P], dtype)
        cache = poisoned(5, block_size, R + P, dtype=dtype)
        args = (kv_c, k_pe, cache, torch.tensor(slots))
        owned = tuple(slot for slot in slots if slot != PAD_SLOT)
        yield Case("latent_store", f"{slots} {dtype}", args, dtype, (2,), owned, is_paged=True)


def prefill_cases() -> Iterator[Case]:
    for seed, (new, lengths, block_size, dtype) in enumerate(
        (
            ([1], [1], 16, F32),
            ([5], [5], 16, F32),
            ([16], [33], 16, F32),
            ([3, 1, 17], [40, 7, 17], 16, F32),
            ([4, 2, 3], [70, 0, 3], 64, F32),
            ([9, 0, 2], [64, 5, 129], 64, BF16),
        )
    ):
        gen = generator(seed)
        H, R, P, nope, V = 3, 32, 16, 16, 32
        cache, seq_lens, table = latent_context(gen, lengths, R + P, block_size, dtype)
        q = fused(gen, sum(new), [H * (nope + P), 4], dtype)[0].unflatten(-1, (H, nope + P))
        kv_b = randn(gen, H, nope + V, R, dtype=dtype) * R**-0.5
        args = (q, kv_b, cache, starts_of(new), seq_lens, table, (nope + P) ** -0.5)
        yield Case("mla_prefill", f"{new} of {lengths} {dtype}", args, dtype)


def decode_cases() -> Iterator[Case]:
    for seed, (lengths, block_size, dtype) in enumerate(
        (
            ([1], 16, F32),
            ([16], 16, F32),
            ([33], 16, F32),
            ([0], 16, F32),
            ([5, 5, 5], 16, F32),
            ([3, 64, 17], 16, F32),
            ([2, 0, 200, 1, 130], 16, F32),
            ([65, 0, 64, 1], 64, BF16),
        )
    ):
        gen = generator(seed)
        H, R, P = 3, 32, 16
        cache, seq_lens, table = latent_context(gen, lengths, R + P, block_size, dtype)
        q = randn(gen, len(lengths), H, R + P + 2, dtype=dtype)[..., : R + P]
        yield Case("mla_decode", f"{lengths} {dtype}", (q, cache, seq_lens, table, R, 48**-0.5), dtype)


def step_cases() -> Iterator[Case]:
    for seed, (lengths, block_size, dtype) in enumerate(
        (([1], 16, F32), ([16], 16, F32), ([5, 33, 0], 16, F32), ([2, 0, 140, 1, 63], 16, F32), ([65, 64, 1], 64, BF16))
    ):
        gen = generator(seed)
        H, R, P, nope, V = 3, 288 if lengths == [16] else 32, 16, 16, 32  # 288: three tiles of the rank, one part full
        cache, seq_lens, table = latent_context(gen, lengths, R + P, block_size, dtype)
        q = fused(gen, len(lengths), [H * (nope + P), 4], dtype)[0].unflatten(-1, (H, nope + P))
        kv_b = randn(gen, H, nope + V, R, dtype=dtype) * R**-0.5
        yield Case("mla_step", f"{lengths} R={R} {dtype}", (q, kv_b, cache, seq_lens, table, (nope + P) ** -0.5), dtype)


# --- rotary embedding, paged key and value caches ------------------------------------------------------------------


def sigmoid_mul_cases() -> Iterator[Case]:
    for T, D, is_wide, dtype in ((1, 16, True, F32), (5, 23, False, F32), (7, 2050, True, F32), (6, 32, False, BF16)):
        gen = generator(T)
        x, gate = fused(gen, T, [D, D], dtype)
        gate = gate if is_wide else gate[:, 1:2]
        yield Case("sigmoid_mul", f"{(T, D)} gate {tuple(gate.shape)} {dtype}", (3 * x, 3 * gate), dtype)


def rotary_cases() -> Iterator[Case]:
    for seed, (T, H, K, F, start, is_interleaved, dtype) in enumerate(
        (
            (1, 1, 8, 4, 0, True, F32),
            (1, 3, 16, 4, 0, False, F32),
            (5, 2, 10, 3, 0, False, F32),
            (5, 3, 24, 4, 16, True, F32),
            (9, 2, 64, 16, 0, False, BF16),
            (4, 2, 24, 4, 16, True, BF16),
        )
    ):
        gen = generator(seed)
        # As layers pass it: heads that are slices of a projection, or the last values of each.
        x = fused(gen, T, [5, H * K], dtype)[1].unflatten(-1, (H, K))[..., start:]
        positions = torch.randint(0, 100_000, (T,), generator=gen)
        frequencies = 1.0 / 10_000.0 ** (torch.arange(F) / F)
        args = (x, positions, frequencies, 1.25 if seed % 2 else 1.0, is_interleaved)
        name = f"{(T, H, K)} first {2 * F} from {start} {'interleaved' if is_interleaved else 'halves'} {dtype}"
        yield Case("rotary", name, args, dtype, (0,), tuple(range(T)))


def kv_store_cases() -> Iterator[Case]:
    for slots, block_size, HK, K, V, dtype in (
        ([5], 4, 2, 16, 16, F32),
        ([PAD_SLOT], 4, 2, 16, 16, F32),
        ([9, 0, 3], 16, 1, 24, 8, F32),
        ([7, PAD_SLOT, 11, PAD_SLOT, 2], 4, 3, 7, 7, BF16),
    ):
        gen = generator(len(slots))
        (_, k, v) = fused(gen, len(slots), [2, HK * K, HK * V], dtype)
        for t, slot in enumerate(slots):
            if slot == PAD_SLOT:
                k[t], v[t] = torch.nan, torch.nan
        caches = (poisoned(5, block_size, HK, K, dtype=dtype), poisoned(5, block_size, HK, V, dtype=dtype))
        args = (k.unflatten(-1, (HK, K)), v.unflatten(-1, (HK, V)), *caches, torch.tensor(slots))
        owned = tuple(slot for slot in slots if slot != PAD_SLOT)
        yield Case("kv_store", f"{slots} {(HK, K, V)} {dtype}", args, dtype, (2, 3), owned, is_paged=True)


def gqa_prefill_cases() -> Iterator[Case]:
    for seed, (new, lengths, block_size, (H, HK, K, V), dtype) in enumerate(
        (
            ([1], [1], 16, (2, 2, 16, 16), F32),
            ([5], [5], 16, (4, 2, 16, 32), F32),
            ([16], [33], 16, (3, 1, 32, 16), F32),
            ([3, 1, 17], [40, 7, 17], 16, (6, 2, 16, 16), F32),
            ([4, 2, 3], [70, 0, 3], 64, (2, 1, 24, 24), F32),
            ([9, 0, 2], [64, 5, 129], 64, (4, 2, 16, 16), BF16),
        )
    ):
        gen = generator(seed)
        caches, seq_lens, table = paged_contexts(gen, lengths, [(HK, K), (HK, V)], block_size, dtype)
        q = fused(gen, sum(new), [H * K, 4], dtype)[0].unflatten(-1, (H, K))
        args = (q, *caches, starts_of(new), seq_lens, table, K**-0.5)
        yield Case("gqa_prefill", f"{new} of {lengths} {(H, HK, K, V)} {dtype}", args, dtype)


def gqa_decode_cases() -> Iterator[Case]:
    for seed, (lengths, block_size, (H, HK, K, V), dtype) in enumerate(
        (
            ([1], 16, (2, 2, 16, 16), F32),
            ([16], 16, (4, 2, 16, 32), F32),
            ([33], 16, (3, 1, 32, 16), F32),
            ([0], 16, (2, 1, 16, 16), F32),
            ([5, 5, 5], 16, (6, 2, 16, 16), F32),
            ([2, 0, 200, 1, 130], 16, (2, 1, 24, 24), F32),
            ([65, 0, 64, 1], 64, (8, 1, 16, 16), BF16),
        )
    ):
        gen = generator(seed)
        caches, seq_lens, table = paged_contexts(gen, lengths, [(HK, K), (HK, V)], block_size, dtype)
        q = fused(gen, len(lengths), [H * K, 4], dtype)[0].unflatten(-1, (H, K))
        args = (q, *caches, seq_lens, table, K**-0.5)
        yield Case("gqa_decode", f"{lengths} {(H, HK, K, V)} {dtype}", args, dtype)


# --- experts -------------------------------------------------------------------------------------------------------


def route_cases() -> Iterator[Case]:
    for seed, (T, E, top_k, scoring, groups, top_groups, best, renormalize, has_bias) in enumerate(
        (
            (1, 12, 2, "sigmoid", 1, 1, 2, True, True),
            (9, 12, 4, "sigmoid", 1, 1, 2, True, True),
            (5, 7, 3, "sigmoid", 1, 1, 2, False, False),
            (5, 8, 8, "softmax", 1, 1, 2, True, False),
            (6, 16, 4, "sigmoid", 4, 2, 2, True, True),
            (6, 16, 3, "softmax", 8, 3, 2, False, True),
            (6, 4, 2, "sigmoid", 4, 2, 2, True, True),
            (9, 20, 4, "softmax", 5, 2, 1, False, False),
            (6, 4, 2, "softmax", 4, 2, 1, False, False),
        )
    ):
        gen = generator(seed)
        logits = randn(gen, T, E)
        bias = randn(gen, E) * 0.3 if has_bias else None
        args = (logits, bias, top_k, scoring, groups, top_groups, best, renormalize, 2.446)
        yield Case("route", f"T={T} E={E} top {top_k} {scoring} {groups} groups by {best}", args)
    ties = torch.zeros(3, 10)
    ties[1, 4:] = 1.0
    yield Case("route", "equal scores", (ties, None, 4, "sigmoid", 1, 1, 2, True, 1.0))
    large = torch.tensor([[200.0, -200.0, 0.0, -300.0]])
    yield Case("route", "saturated scores", (large, None, 2, "sigmoid", 1, 1, 2, True, 1.0))


def expert_cases() -> Iterator[Case]:
    for seed, (T, J, E, D, width, dtype, skipped) in enumerate(
        (
            (1, 2, 6, 40, 24, F32, ()),
            (1, 3, 6, 32, 16, F32, ((0, 1),)),
            (1, 2, 4, 32, 16, F32, ((0, 0), (0, 1))),
            (7, 3, 12, 40, 24, F32, ()),
            (7, 3, 5, 32, 16, F32, ((2, 0), (2, 1), (2, 2), (5, 1))),
            (40, 4, 8, 32, 16, BF16, ((39, 3),)),
            (1, 4, 8, 32, 16, BF16, ()),
        )
    ):
        gen = generator(seed)
        x = fused(gen, T, [D, 3], dtype)[0]
        ids = torch.stack([torch.randperm(E, generator=gen)[:J] for _ in range(T)]).int()
        weights = torch.rand(T, J, generator=gen)
        for t, j in skipped:
            ids[t, j] = -1
            weights[t, j] = torch.nan
        w13, w2 = poisoned(E, 2 * width, D, dtype=dtype), poisoned(E, D, width, dtype=dtype)
        for e in set(ids.flatten().tolist()) - {-1}:
            w13[e] = randn(gen, 2 * width, D, dtype=dtype) * D**-0.5
            w2[e] = randn(gen, D, width, dtype=dtype) * width**-0.5
        args = (x, w13, w2, weights, ids)
        yield Case("grouped_experts", f"T={T} J={J} E={E} {dtype} skips {len(skipped)}", args, dtype)


def routed_cases() -> Iterator[Case]:
    for seed, (T, E, shared, top_k, scoring, dtype) in enumerate(
        (
            (1, 8, 1, 2, "sigmoid", F32),
            (5, 8, 0, 3, "softmax", F32),
            (9, 6, 2, 2, "sigmoid", F32),
            (33, 8, 1, 4, "sigmoid", BF16),
        )
    ):
        gen = generator(seed)
        D, width = 32, 16
        x = fused(gen, T, [D, 3], dtype)[0]
        logits, bias = randn(gen, T, E), randn(gen, E) * 0.3
        w13 = randn(gen, E + shared, 2 * width, D, dtype=dtype) * D**-0.5
        w2 = randn(gen, E + shared, D, width, dtype=dtype) * width**-0.5
        args = (x, logits, bias, w13, w2, top_k, scoring, 1, 1, 2, True, 2.446)
        yield Case("routed_experts", f"T={T} E={E}+{shared} top {top_k} {dtype}", args, dtype)


def linear_cases() -> Iterator[Case]:
    for T, N, K, dtype, out in (
        (1, 24, 40, F32, F32),
        (1, 70, 33, BF16, F32),
        (5, 70, 48, F32, F32),
        (5, 33, 130, BF16, F32),
        (16, 20, 300, BF16, BF16),
        (17, 24, 40, BF16, BF16),
    ):
        gen = generator(T)
        x = fused(gen, T, [K, 3], dtype)[0]
        yield Case("linear", f"{T}x{N}x{K} {dtype} to {out}", (x, randn(gen, N, K, dtype=dtype), out), dtype)


GENERATORS: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": lambda: norm_cases("rms_norm"),
    "add_rms_norm": add_norm_cases,
    "gated_rms_norm": lambda: norm_cases("gated_rms_norm"),
    "silu_and_mul": silu_cases,
    "causal_conv": conv_cases,
    "decay_gate": gate_cases,
    "chunked_delta_rule": lambda: delta_cases("chunked_delta_rule"),
    "recurrent_delta_rule": lambda: delta_cases("recurrent_delta_rule"),
    "delta_prefill": delta_prefill_cases,
    "delta_step": delta_step_cases,
    "low_rank_delta_step": low_rank_step_cases,
    "greedy": greedy_cases,
    "latent_store": store_cases,
    "mla_prefill": prefill_cases,
    "mla_decode": decode_cases,
    "mla_step": step_cases,
    "sigmoid_mul": sigmoid_mul_cases,
    "rotary": rotary_cases,
    "kv_store": kv_store_cases,
    "gqa_prefill": gqa_prefill_cases,
    "gqa_decode": gqa_decode_cases,
    "route": route_cases,
    "grouped_experts": expert_cases,
    "routed_experts": routed_cases,
    "linear": linear_cases,
}


def op_names() -> list[str]:
    """The op list, from the protocol itself."""
    return [name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")]


def cases_of(op: str) -> list[Case]:
    return list(GENERATORS[op]())
