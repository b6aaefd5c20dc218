"""Runs the source of a module of Gluon kernels on the CPU: torch in place of Gluon's operations, a thread a partition.

One thread runs at a time; at every barrier a seeded choice says who goes on and when a copy lands, some slower than
others for a while. Copies read and write late, products are computed and stores made when they are waited for, and what
a copy will write is NaN until it lands, so that a barrier too few is seen in the results. Where nobody can go on,
`DeadlockError` is raised at once.
"""

from __future__ import annotations

import builtins
import re
import struct
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MAX_SWITCHES = 200_000
"""Of one launch; a kernel that goes round forever ends here."""

SPEEDS = (1, 1, 8, 64)
"""How likely a partition, or the engine that copies, goes on when others could; drawn anew after `SPELL` switches."""

SPELL = 48


class DeadlockError(AssertionError):
    """No partition can go on."""


class Stopped(BaseException):
    """Ends a thread after another one has failed."""


class Part:
    """A partition of a program: what it waits for and what it has started."""

    def __init__(self, program: int, num_warps: int, body: Callable[[], None]) -> None:
        self.program, self.num_warps, self.body = program, num_warps, body
        self.baton = threading.Semaphore(0)
        self.until: Callable[[], bool] | None = None
        self.speed = 1
        self.is_over = False
        self.products: list[Product] = []
        self.copies: list[Callable[[], None]] = []  # cp.async, not landed
        self.stores: list[Callable[[], None]] = []  # of the copy engine, not made
        self.unfenced: set[int] = set()  # places written by threads, which the engines do not see yet


class Machine:
    """One launch: all partitions of all programs, and copies under way."""

    def __init__(self, seed: int, num_programs: int) -> None:
        self.num_programs = num_programs
        self.parts: list[Part] = []
        self.events: list[Callable[[], None]] = []  # copies, each landing once
        self.error: BaseException | None = None
        self.current = Part(-1, 0, lambda: None)  # the caller
        self._caller, self._random, self._switches, self._copy_speed = self.current, Random(seed), 0, 1

    def add(self, part: Part) -> None:
        self.parts.append(part)
        threading.Thread(target=self._live, args=(part,), daemon=True).start()

    def run(self) -> None:
        """Until every partition and copy is over; raises what a partition raised."""
        self.switch(lambda: all(part.is_over for part in self.parts) and not self.events)
        if self.error is not None:
            raise self.error

    def switch(self, until: Callable[[], bool] | None = None) -> None:
        """Lets others go on, at least until `until` holds."""
        me = self.current
        me.until = until
        self._pass_on()
        me.baton.acquire()
        if self.error is not None and me is not self._caller:
            raise Stopped

    def _live(self, part: Part) -> None:
        part.baton.acquire()
        try:
            if self.error is None:
                part.body()
                assert not part.stores, "a partition ended while the copy engine read its buffers"
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  # for `run` to raise
            self.error = self.error or error
        part.is_over = True
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives the baton to a partition that can go on, or to the caller at the end."""
        while self.error is None:
            if self._switches % SPELL == 0:
                self._draw_speeds()
            self._switches += 1
            ready = [p for p in self.parts if not p.is_over and (p.until is None or p.until())]
            choices = [*ready, *self.events]
            if self._switches > MAX_SWITCHES:
                self.error = DeadlockError(f"no end after {MAX_SWITCHES} switches")
            elif not choices and all(part.is_over for part in self.parts):
                return self._resume(self._caller)
            elif not choices:
                waiting = [p.program for p in self.parts if not p.is_over]
                self.error = DeadlockError(f"partitions of programs {waiting} wait for each other")
            else:
                speeds = [p.speed for p in ready] + [self._copy_speed] * len(self.events)
                (chosen,) = self._random.choices(choices, speeds)
                if isinstance(chosen, Part):
                    return self._resume(chosen)
                self.events.remove(chosen)
                try:
                    chosen()
                except AssertionError as error:
                    self.error = error
        # A failure: threads end one after the other, then the caller raises it.
        left = [p for p in self.parts if not p.is_over]
        self._resume(left[0] if left else self._caller)

    def _draw_speeds(self) -> None:
        self._copy_speed = self._random.choice(SPEEDS)
        for part in self.parts:
            part.speed = self._random.choice(SPEEDS)

    def _resume(self, part: Part) -> None:
        self.current, part.until = part, None
        part.baton.release()


class Value(Tensor):
    """A block or a number in a kernel; operations on it give such again."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def split(self, *sizes: Any) -> Any:
        """Gluon's takes apart a last axis of two."""
        if sizes:
            return super().split(*sizes)
        left, right = self.unbind(-1)
        return left, right


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Constant(int):
    """A number that is known to the compiler."""

    @property
    def value(self) -> int:
        return int(self)


class Pointer:
    """Into a tensor's memory; `offset` counts elements."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        storage = base.untyped_storage()
        self.cells = torch.empty(0, dtype=base.dtype).set_(storage)  # type: ignore[call-overload]
        self.base, self.offset, self.dtype = base, offset, SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset - offset)

    def places(self) -> Value:
        return value(self.offset) + self.base.storage_offset()


class Memory:
    """Shared memory."""

    layout = None

    def __init__(self, cells: Tensor, on_store: Callable[[Memory], None]) -> None:
        self.cells, self.shape, self._on_store = cells, list(cells.shape), on_store

    @property
    def place(self) -> int:
        return self.cells.data_ptr()

    def index(self, i: Any) -> Memory:
        assert 0 <= int(i) < self.shape[0], f"index {int(i)} of {self.shape}"
        return Memory(self.cells[int(i)], self._on_store)

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.cells.permute(*order), self._on_store)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
        assert dtype == self.cells.dtype
        return Memory(self.cells.view(*shape), self._on_store)

    def store(self, block: Tensor) -> None:
        assert list(block.shape) == self.shape
        self.cells.copy_(block)
        self._on_store(self)

    def load(self, layout: object) -> Value:
        return value(self.cells.clone())

    def forget(self) -> None:
        """What is there is nothing from now on."""
        self.cells.fill_(torch.nan)


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int, num_bytes: int = 0) -> None:
        assert self.pending >= count, f"{count} arrivals where {self.pending} are left of {self.count}"
        self.pending -= count
        self.land(-num_bytes)

    def land(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Barriers:
    def __init__(self, count: int) -> None:
        self._barriers = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self._barriers[int(i)]


class Descriptor:
    """A matrix that the copy engine reads and writes in tiles; zeros outside."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        assert base.data_ptr() % 16 == strides[0] * base.element_size() % 16 == 0, "not aligned for the copy engine"
        assert strides[1] == 1
        self.block_shape, self.layout = block_shape, layout
        self._matrix = base.as_strided(shape, strides, base.storage_offset())

    def part(self, coord: list[Any]) -> Tensor:
        (row, col), (rows, cols) = (int(x) for x in coord), self.block_shape
        assert min(row, col) >= 0
        return self._matrix[row : row + rows, col : col + cols]

    def tile(self, coord: list[Any]) -> Tensor:
        part = self.part(coord)
        tile = torch.zeros(self.block_shape, dtype=part.dtype)
        tile[: part.shape[0], : part.shape[1]] = part
        return tile


class Product:
    """Of the matrix units: operands are read when it is waited for, at the latest."""

    def __init__(self, a: Any, b: Memory, acc: Any) -> None:
        self._operands, self.result = (a, b, acc), None

    def finish(self) -> None:
        a, b, acc = (x.cells if isinstance(x, Memory) else x for x in self._operands)
        acc = acc.result if isinstance(acc, Product) else acc
        self.result = value(a.float() @ b.float()) + acc


class Gluon:
    """The names that a module of kernels imports, for one launch after the other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.machine = Machine(seed, 0)

    @property
    def me(self) -> Part:
        return self.machine.current

    def modules(self) -> dict[str, Any]:
        """By the names that they are imported by."""
        hopper = {name: getattr(self, name) for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")}
        barriers = {name: getattr(self, name) for name in ("wait", "arrive", "expect")}
        barriers |= {"init": lambda barrier, count: barrier.init(count), "MBarrierLayout": lambda: Barriers}
        copies = {
            "async_copy_global_to_shared": self.cp_async,
            "mbarrier_arrive": self.cp_async_arrive,
        }
        tma = {
            "async_copy_global_to_shared": self.tma_load,
            "async_copy_shared_to_global": self.tma_store,
            "store_wait": self.store_wait,
        }
        root, language = "triton.experimental", "triton.experimental.gluon.language.nvidia.hopper"
        spaces = {"mbarrier": barriers, "async_copy": copies, "tma": tma}
        return {
            root: SimpleNamespace(gluon=SimpleNamespace(jit=self.jit)),
            f"{root}.gluon": SimpleNamespace(language=self.language()),
            f"{root}.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
            language: SimpleNamespace(**hopper, **{name: SimpleNamespace(**space) for name, space in spaces.items()}),
        }

    def language(self) -> Any:
        def nothing(*args: object, **kwargs: object) -> None:
            return None

        def two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Value]:
            return lambda a, b: value(function(value(a), value(b)))

        layouts = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout")
        constructors = dict.fromkeys((*layouts, "DistributedLinearLayout", "AutoLayout"), nothing)
        shared_layout = type("NVMMASharedLayout", (), {"get_default_for": nothing, "__init__": nothing})
        return SimpleNamespace(
            **constructors, NVMMASharedLayout=shared_layout,
            constexpr=lambda x: Constant(x) if type(x) is int else x,
            float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64,
            arange=lambda start, end, layout=None: value(torch.arange(start, end)),
            zeros=lambda shape, dtype, layout=None: value(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, x, dtype, layout=None: value(torch.full(shape, float(x))).to(dtype),
            where=lambda condition, a, b: value(torch.where(value(condition), a, b)),
            minimum=two(torch.minimum), maximum=two(torch.maximum), exp2=torch.exp2,
            sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
            expand_dims=lambda x, axis: value(x).unsqueeze(axis), multiple_of=multiple_of,
            convert_layout=lambda x, layout, assert_trivial=False: x,
            inline_asm_elementwise=inline_asm, load=load, store=store, atomic_add=atomic_add,
            static_range=range, static_assert=nothing, thread_barrier=self.thread_barrier,
            program_id=lambda axis: value(self.me.program), num_programs=lambda axis: self.machine.num_programs,
            num_warps=lambda: self.me.num_warps, allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
        )  # fmt: skip

    def jit(self, function: Any = None, **options: object) -> Any:
        return Kernel(self, function) if function is not None else lambda function: Kernel(self, function)

    def launch(self, body: Callable[[], None], num_programs: int, num_warps: int) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._seed += 1
        self.machine = Machine(self._seed, num_programs)
        try:
            for program in range(num_programs):
                self.machine.add(Part(program, num_warps, body))
            self.machine.run()
        finally:
            torch.set_num_threads(threads)

    def warp_specialize(
        self, parts: list[tuple[Any, tuple[Any, ...]]], num_warps: list[int], registers: object
    ) -> None:
        (first, arguments), *others = parts
        workers = [
            Part(self.me.program, warps, lambda function=function, given=given: function(*given))
            for (function, given), warps in zip(others, num_warps, strict=True)
        ]
        for worker in workers:
            self.machine.add(worker)
        first(*arguments)
        self.machine.switch(lambda: all(worker.is_over for worker in workers))

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        """Full of NaN; barriers where the layout says so."""
        if layout is Barriers:
            return Barriers(shape[0]) if len(shape) == 2 else Barrier()
        cells = torch.full(shape, torch.nan if dtype.is_floating_point else -99, dtype=dtype)
        return Memory(cells, self._write_by_threads)

    def thread_barrier(self) -> None:
        """Of a partition's own threads, which are one here."""

    def wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if bool(pred):
            self.machine.switch(lambda: barrier.phase & 1 != int(phase))

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if bool(pred):
            barrier.arrive(count)
            self.machine.switch()

    def expect(self, barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
        if bool(pred):
            barrier.arrive(1, num_bytes)
            self.machine.switch()

    def fence_async_shared(self) -> None:
        self.me.unfenced.clear()

    def _write_by_threads(self, memory: Memory) -> None:
        for part in self.machine.parts:
            part.unfenced.add(memory.place)

    def tma_load(
        self, matrix: Descriptor, coord: list[Any], barrier: Barrier, memory: Memory, pred: Any = True
    ) -> None:
        if not bool(pred):
            return
        assert memory.shape == list(matrix.block_shape)
        memory.forget()
        coord = [int(x) for x in coord]

        def land() -> None:
            memory.cells.copy_(matrix.tile(coord))
            for part in self.machine.parts:
                part.unfenced.discard(memory.place)
            barrier.land(memory.cells.numel() * memory.cells.element_size())

        self.machine.events.append(land)
        self.machine.switch()

    def tma_store(self, matrix: Descriptor, coord: list[Any], memory: Memory) -> None:
        assert memory.shape == list(matrix.block_shape)
        assert memory.place not in self.me.unfenced, "the copy engine reads what threads wrote before a fence"
        target = matrix.part([int(x) for x in coord])

        def land() -> None:
            target.copy_(memory.cells[: target.shape[0], : target.shape[1]])

        self.me.stores.append(land)
        self.machine.switch()

    def store_wait(self, num_left: int) -> None:
        stores = self.me.stores
        for store in stores[: max(0, len(stores) - num_left)]:
            store()
        del stores[: max(0, len(stores) - num_left)]

    def cp_async(self, memory: Memory, pointer: Pointer, mask: Tensor | None = None) -> None:
        memory.forget()
        assert list(pointer.places().shape) == memory.shape

        def land() -> None:
            memory.cells.copy_(load(pointer, mask))
            self._write_by_threads(memory)

        self.me.copies.append(land)

    def cp_async_arrive(self, barrier: Barrier, increment_count: bool = True) -> None:
        """Once the copies so far have landed, all threads arrive."""
        assert not increment_count
        copies, count = self.me.copies, 32 * self.me.num_warps
        self.me.copies = []

        def land() -> None:
            for copy in copies:
                copy()
            barrier.arrive(count)

        self.machine.events.append(land)
        self.machine.switch()

    def warpgroup_mma(self, a: Any, b: Memory, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
        assert is_async
        for operand in (a, b):
            is_seen = not isinstance(operand, Memory) or operand.place not in self.me.unfenced
            assert is_seen, "the matrix units read what threads wrote before a fence"
        product = Product(a, b, acc if bool(use_acc) else 0.0)
        self.me.products.append(product)
        self.machine.switch()
        return product

    def warpgroup_mma_wait(self, num_left: int, deps: Any) -> Any:
        products = self.me.products
        for product in products[: max(0, len(products) - num_left)]:
            product.finish()
        del products[: max(0, len(products) - num_left)]
        done = [x.result if isinstance(x, Product) and x.result is not None else x for x in deps]
        return done[0] if len(done) == 1 else tuple(done)


class Kernel:
    """A jit function: called by others, or launched on a grid."""

    def __init__(self, gluon: Gluon, function: Callable[..., Any]) -> None:
        self._gluon, self._function = gluon, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **kwargs: Any) -> None:
            given = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
            self._gluon.launch(lambda: self._function(*given, **kwargs), grid[0], num_warps)

        return launch


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    places, seen = _cells_of(pointer, mask)
    loaded = torch.full(places.shape, other, dtype=pointer.cells.dtype)
    loaded[seen] = pointer.cells[places[seen]]
    return value(loaded)


def store(pointer: Pointer, block: Any, mask: Any = None) -> None:
    places, seen = _cells_of(pointer, mask)
    pointer.cells[places[seen]] = torch.as_tensor(block).expand(places.shape)[seen].to(pointer.cells.dtype)


def _cells_of(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    """Where a block of pointers points to, and which of them are used."""
    places = pointer.places().as_subclass(Tensor).long()
    seen = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor).expand(places.shape)
    outside = seen & ((places < 0) | (places >= pointer.cells.numel()))
    assert not outside.any(), f"{int(outside.sum())} cells outside the tensor"
    return places, seen


def atomic_add(pointer: Pointer, amount: int, sem: str = "acq_rel") -> Value:
    place = int(pointer.places())
    before = value(pointer.cells[place].clone())
    pointer.cells[place] += amount
    return before


def multiple_of(x: Any, divisor: int) -> Any:
    """Of a pointer, its bytes."""
    numbers = x.places() * x.cells.element_size() + x.cells.data_ptr() if isinstance(x, Pointer) else value(x)
    assert bool((numbers % divisor == 0).all()), f"not a multiple of {divisor}"
    return x


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mul.f32": torch.mul,
    "add.f32": torch.add,
    "ex2.approx.ftz.f32": torch.exp2,
    "rcp.approx.ftz.f32": torch.reciprocal,
}


def inline_asm(text: str, constraints: str, arguments: list[Tensor], **options: object) -> Value:
    """Runs PTX of one result, `$0`, instruction by instruction."""
    registers: dict[str, Any] = {f"${i + 1}": x for i, x in enumerate(arguments)}

    def read(name: str) -> Any:
        is_number = name.startswith("0f")
        return torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:]))[0]) if is_number else registers[name]

    for name, operands in re.findall(r"^\s*([a-z][\w.]*)\s+([^;]+);", text, re.MULTILINE):
        target, *sources = (x.strip() for x in operands.split(","))
        registers[target] = OPERATIONS[name](*(read(x) for x in sources))
    return value(registers["$0"])


def load_module(name: str, seed: int = 0, edits: tuple[tuple[str, str], ...] = ()) -> ModuleType:
    """`deltafold.ops.triton.<name>` with the names of Gluon replaced, and parts of its text: for this caller alone."""
    spec = find_spec(f"deltafold.ops.triton.{name}")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    for before, after in edits:
        assert before in text, before
        text = text.replace(before, after)
    replaced = Gluon(seed).modules()

    def find(module: str, *args: Any, **kwargs: Any) -> Any:
        return replaced[module] if module in replaced else builtins.__import__(module, *args, **kwargs)

    loaded = ModuleType(spec.name)
    loaded.__dict__["__builtins__"] = vars(builtins) | {"__import__": find}
    exec(compile(text, spec.origin, "exec"), loaded.__dict__)
    return loaded
