"""Slots, blocks and host memory whose content says of which tokens it is: a runner without tensors.

A slot holds a hash of the tokens its state has absorbed; a row of a block holds the hash of all tokens up to it. Every
step checks what it reads, so that a state of other tokens, an unwritten slot or a lost row is found where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deltafold.cache.prefix_cache import PrefixCache, extend_hashes
from deltafold.cache.transfers import CopySlot, DropHost, LoadBlocks, LoadSlot, SaveBlocks, SaveSlot, Transfer
from deltafold.scheduler.output import RequestResult, ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import PENDING_TOKEN, Request

BLOCK = 64
GARBAGE = -1
"""What memory holds that was never written, or was half written by a step that failed."""


def history(token_ids: Sequence[int]) -> list[int]:
    """Entry i is a hash of the first i tokens."""
    hashes = [17]
    for token_id in token_ids:
        hashes.append(hash((hashes[-1], token_id)))
    return hashes


def next_token(state: int, vocab: int) -> int:
    """What the fake model draws after the tokens of `state`."""
    return state // 8 % vocab


def continuation(prompt: Sequence[int], num_tokens: int, vocab: int) -> list[int]:
    """The only right output: of a model, not of an engine."""
    state = history(prompt)[-1]
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(state, vocab))
        state = hash((state, output[-1]))
    return output


@dataclass(frozen=True)
class FakeStep:
    """Stands for a StepInFlight."""

    results: Mapping[str, RequestResult]

    def wait(self) -> Mapping[str, RequestResult]:
        return self.results


class FakeMemory:
    """Stands for a ModelRunner. `fails_step` and `fails_save` say, asked each time, what runs out of memory."""

    def __init__(self, cache: PrefixCache, vocab: int) -> None:
        self.cache = cache
        self.vocab = vocab
        self.slots = [GARBAGE] * cache.slots.total
        self.device_tokens = [GARBAGE] * cache.slots.total
        self.rows = [[GARBAGE] * BLOCK for _ in range(cache.blocks.total)]
        self.host_states: dict[int, int] = {}
        self.host_rows: dict[int, list[int]] = {}
        self.state_of: dict[bytes, int] = {}  # by a block's hash: the state after it
        self.rows_of: dict[bytes, list[int]] = {}
        self.histories: dict[str, list[int]] = {}
        self.outputs: list[SchedulerOutput] = []
        self.num_failed_saves = 0
        self.num_pending_reads = 0  # decodes of a token that the host did not know yet
        self.fails_step: Callable[[], bool] = lambda: False
        self.fails_save: Callable[[], bool] = lambda: False

    def transfer(self, transfers: Sequence[Transfer]) -> list[int]:
        failed: list[int] = []
        for transfer in transfers:
            match transfer:
                case CopySlot(source, target):
                    self.slots[target] = self.slots[source]
                case SaveSlot(_, host_id) | SaveBlocks(_, _, host_id):
                    self._save(transfer, host_id, failed)
                case LoadSlot(host_id, slot):
                    self.slots[slot] = self.host_states[host_id]
                case LoadBlocks(host_id, first_block, block_ids):
                    saved = self.host_rows[host_id]
                    for i, block_id in enumerate(block_ids, start=first_block):
                        part = saved[i * BLOCK : (i + 1) * BLOCK]
                        self.rows[block_id] = part + [GARBAGE] * (BLOCK - len(part))
                case DropHost(host_id):
                    self.host_states.pop(host_id, None)
                    self.host_rows.pop(host_id, None)
        return failed

    def launch(self, output: SchedulerOutput) -> FakeStep:
        self.outputs.append(output)
        self._check_places(output)
        for item in output.scheduled:
            self._check_reads(item)
        if self.fails_step():
            for item in output.scheduled:
                self._spoil(item)
            raise MemoryError("injected")
        return FakeStep({item.request.key: self._compute(item) for item in output.scheduled})

    def history(self, request: Request) -> list[int]:
        """Of all tokens the request has so far, the one included that only the device knows."""
        known = self.histories.setdefault(request.key, history([]))
        token_ids = self._token_ids(request)
        if len(known) <= len(token_ids):
            for token_id in token_ids[len(known) - 1 :]:
                known.append(hash((known[-1], token_id)))
            self._learn(request, token_ids, known)
        return known

    def _token_ids(self, request: Request) -> list[int]:
        if request.token_ids[-1] != PENDING_TOKEN:
            return request.token_ids
        return [*request.token_ids[:-1], self.device_tokens[request.state_slot or 0]]

    def check(self) -> None:
        """Every published snapshot and every cached block is of exactly the tokens it is filed under."""
        for snapshot in [*self.cache._in_slots.values(), *self.cache._in_host.values()]:
            found = self.slots[snapshot.slot] if snapshot.slot is not None else self.host_states[snapshot.host_id or 0]
            assert found == self.state_of[snapshot.key], f"{snapshot.owner} is of other tokens"
        for key, block_id in self.cache._block_of.items():
            assert self.rows[block_id] == self.rows_of[key], f"block {block_id} is of other tokens"
        assert self.cache.host._entries.keys() == self.host_states.keys() >= self.host_rows.keys()

    def _learn(self, request: Request, token_ids: list[int], known: list[int]) -> None:
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, BLOCK, request.salt)
        for i, key in enumerate(hashes):
            self.state_of[key] = known[(i + 1) * BLOCK]
            self.rows_of[key] = known[i * BLOCK + 1 : (i + 1) * BLOCK + 1]

    def _save(self, transfer: SaveSlot | SaveBlocks, host_id: int, failed: list[int]) -> None:
        if host_id in failed:
            return
        if self.fails_save():
            self.num_failed_saves += 1
            failed.append(host_id)
            self.host_states.pop(host_id, None)
        elif isinstance(transfer, SaveSlot):
            self.host_states[host_id] = self.slots[transfer.slot]
        else:
            rows = [row for block_id in transfer.block_ids for row in self.rows[block_id]]
            self.host_rows[host_id] = rows[: transfer.num_tokens]

    def _check_places(self, output: SchedulerOutput) -> None:
        slots = [item.request.state_slot for item in output.scheduled]
        slots += [item.snapshot.slot for item in output.scheduled if item.snapshot is not None]
        assert len(set(slots)) == len(slots), "two of a step write one slot"
        written = [block for item in output.scheduled for block in written_blocks(item)]
        assert len(set(written)) == len(written), "two requests write one block"
        assert not self.cache.blocks.registered & set(written), "a block whose content is known is written again"

    def _check_reads(self, item: ScheduledRequest) -> None:
        request, start = item.request, item.num_computed_tokens
        known = self.history(request)
        assert item.has_initial_state == (start > 0)
        self.num_pending_reads += request.token_ids[-1] == PENDING_TOKEN
        if item.is_decode and item.has_device_token:
            assert self.device_tokens[request.state_slot or 0] == self._token_ids(request)[start]
        if item.has_initial_state:
            assert self.slots[request.state_slot or 0] == known[start], f"{request.key} reads a state of other tokens"
        for i, block_id in enumerate(request.block_ids):
            before = max(0, min(BLOCK, start - i * BLOCK))
            expected = known[i * BLOCK + 1 : i * BLOCK + 1 + before]
            assert self.rows[block_id][:before] == expected, f"{request.key} reads rows of other tokens"

    def _compute(self, item: ScheduledRequest) -> RequestResult:
        request, start = item.request, item.num_computed_tokens
        known, end = self.history(request), item.num_computed_tokens + item.num_scheduled_tokens
        for position in range(start, end):
            self.rows[request.block_ids[position // BLOCK]][position % BLOCK] = known[position + 1]
        self.slots[request.state_slot or 0] = known[end]
        if item.snapshot is not None:
            assert 0 < item.snapshot.num_tokens <= item.num_scheduled_tokens
            assert (start + item.snapshot.num_tokens) % BLOCK == 0
            self.slots[item.snapshot.slot] = known[start + item.snapshot.num_tokens]
        if not item.is_sampled:
            return RequestResult()
        token_id = next_token(known[end], self.vocab)
        self.device_tokens[request.state_slot or 0] = token_id
        return RequestResult(token_id)

    def _spoil(self, item: ScheduledRequest) -> None:
        request, start = item.request, item.num_computed_tokens
        self.slots[request.state_slot or 0] = GARBAGE
        for position in range(start, start + item.num_scheduled_tokens):
            self.rows[request.block_ids[position // BLOCK]][position % BLOCK] = GARBAGE
        if item.snapshot is not None:
            self.slots[item.snapshot.slot] = GARBAGE


def written_blocks(item: ScheduledRequest) -> list[int]:
    """Blocks that the item's tokens go to."""
    end = item.num_computed_tokens + item.num_scheduled_tokens
    return item.request.block_ids[item.num_computed_tokens // BLOCK : (end - 1) // BLOCK + 1]
