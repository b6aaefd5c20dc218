"""Faults that engines of this kind have shipped, by the number the project gives them, put to the engine's core.

Ops, files and tokens have theirs in `tests/ops`, `tests/checkpoint` and `tests/tokenizer`; 8 and 10 are equivalences
and in `test_equivalence.py`, those of a caller's view in `test_engine.py`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import base_config, random_prompt, special_id, write_checkpoint
from tests.siblings import WRITERS
from tests.stepping import PLACE, LoadedModel, RecordingRunner, Stepper, cache_tensors, poison
from tests.straight_line import straight_line, token_by_token
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltafold import (
    CapacityError,
    ConfigError,
    DeltafoldWarning,
    Engine,
    FinishReason,
    LoadError,
    NumericalError,
    SamplingParams,
    WeightsError,
)
from deltafold.cache.memory import LayerCache
from deltafold.checkpoint.config import ModelConfig, load_config, parse_config
from deltafold.checkpoint.weights import random_tensors
from deltafold.models import ARCHITECTURES
from deltafold.models.kimi_linear import KimiLinear
from deltafold.ops import select
from deltafold.runner.runner import StepInFlight
from deltafold.scheduler.output import SchedulerOutput
from deltafold.scheduler.request import Request, RequestStatus

EIGHT = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)


def logits_on(loaded: LoadedModel, byte: int) -> Tensor:
    """5 tokens and 8 more, on caches filled with a byte."""
    stepper = Stepper(loaded)
    poison(stepper.caches, byte)
    request = stepper.add(random_prompt(1, 5), EIGHT)
    stepper.run()
    return stepper.logits_of(request)


def test_1_memory_of_any_content_gives_the_logits_of_zeroed_memory(tiny: LoadedModel) -> None:
    zeroed = logits_on(tiny, 0)
    assert torch.isfinite(zeroed).all()
    for byte in (0xFF, 0x7F, 0x40):  # NaN; huge; 3.0
        assert torch.equal(logits_on(tiny, byte), zeroed)


@pytest.mark.parametrize("num_tokens", [63, 65, 130])
def test_2_rectangular_states_chunked_equal_the_recurrence(num_tokens: int, tiny: LoadedModel) -> None:
    """K = 16 and V = 24, which the format of the checkpoint cannot say but the layers must not depend on."""
    linear = tiny.config.linear_attention
    assert linear is not None
    config = replace(tiny.config, linear_attention=replace(linear, value_head_dim=24, num_value_heads=6))
    table = KimiLinear.parameter_table(config)
    tensors = random_tensors(table, compute_dtype=torch.float32, device=PLACE.device, seed=3)
    loaded = LoadedModel(config, KimiLinear(config, tensors, select(PLACE.backend), torch.float32))
    judge = LoadedModel(config, KimiLinear(config, tensors, select("reference"), torch.float32))
    stepper = Stepper(loaded, max_num_batched_tokens=64)
    request = stepper.add(random_prompt(2, num_tokens), EIGHT)
    stepper.run()
    expected = token_by_token(judge, request.token_ids[:-1])[num_tokens - 1 :]
    scale = float(expected.abs().max())
    assert float((stepper.logits_of(request) - expected).abs().max()) <= 1e-4 * scale


def test_5_one_token_prompt_reads_nothing_of_the_slot_s_last_owner(tiny: LoadedModel) -> None:
    fresh = straight_line(tiny, [17], 8)
    stepper = Stepper(tiny)
    for tensor in cache_tensors(stepper.caches):
        tensor.fill_(7.0)
    request = stepper.add([17], EIGHT)
    stepper.run()
    assert torch.equal(stepper.logits_of(request), fresh.logits)


def test_5_queries_of_one_token_are_told_apart_by_what_was_computed(tiny: LoadedModel) -> None:
    """Contexts of 100, 50 and 1 tokens after the step: two decodes and one prefill."""
    prompts = [random_prompt(5, 99), random_prompt(6, 49), [17]]
    stepper = Stepper(tiny)
    requests = [stepper.add(prompt, EIGHT) for prompt in prompts[:2]]
    stepper.step()
    for tensor in cache_tensors(stepper.caches):
        free = [slot for slot in range(stepper.slots.total) if slot not in {r.state_slot for r in requests}]
        if tensor.shape[0] == stepper.slots.total:
            tensor[free] = 7.0
    requests.append(stepper.add(prompts[2], EIGHT))
    stepper.step()
    items = stepper.runner.outputs[-1].scheduled
    assert [item.num_scheduled_tokens for item in items] == [1, 1, 1]
    assert [item.num_computed_tokens + item.num_scheduled_tokens for item in items] == [100, 50, 1]
    assert [item.is_decode for item in items] == [True, True, False]
    assert [item.has_initial_state for item in items] == [True, True, False]
    stepper.run()
    assert [r.output_token_ids for r in requests] == [straight_line(tiny, prompt, 8).token_ids for prompt in prompts]


def test_7_nan_in_whatever_is_free_reaches_nobody(tiny: LoadedModel) -> None:
    """Before every step NaN goes into all free blocks and slots and the unwritten rest of blocks: prefill, continued
    prefill and decode each start on memory that was NaN a moment ago."""
    stepper = Stepper(tiny, num_blocks=9, num_slots=3, max_num_batched_tokens=64)
    prompts = [random_prompt(20 + i, length) for i, length in enumerate((130, 1, 64, 200, 5))]
    requests = [stepper.add(prompt, EIGHT) for prompt in prompts]
    stepper.run(lambda: nan_into_free(stepper))
    for request, prompt in zip(requests, prompts, strict=True):
        run = straight_line(tiny, prompt, 8)
        assert request.output_token_ids == run.token_ids
        assert float((stepper.logits_of(request) - run.logits).abs().max()) <= 1e-4 * float(run.logits.abs().max())


def nan_into_free(stepper: Stepper) -> None:
    running = [r for r in stepper.scheduler.requests if r.status is RequestStatus.RUNNING]
    slots = [i for i in range(stepper.slots.total) if i not in {r.state_slot for r in running}]
    written = {row for r in running for row in rows_of(r)}
    rows = [row for row in range(stepper.blocks.total * 64) if row not in written]
    for cache in stepper.caches:
        for _, tensor in cache.slot_tensors():
            tensor[slots] = float("nan")
        for _, tensor in cache.block_tensors():
            tensor.flatten(0, 1)[rows] = float("nan")


def rows_of(request: Request) -> list[int]:
    return [request.block_ids[p // 64] * 64 + p % 64 for p in range(request.num_computed_tokens)]


def test_9_five_blocks_in_chunks_of_one_give_the_last_logits_of_one_shot(tiny: LoadedModel) -> None:
    prompt = random_prompt(9, 5 * 64)
    one_shot = straight_line(tiny, prompt, 1)
    stepper = Stepper(tiny, max_num_batched_tokens=64)
    request = stepper.add(prompt, replace(EIGHT, max_tokens=1))
    stepper.run()
    assert [output.num_tokens for output in stepper.runner.outputs] == [64] * 5
    error = (stepper.logits_of(request) - one_shot.logits).abs().max()
    assert float(error) <= 1e-4 * float(one_shot.logits.abs().max())


class FailingRunner(RecordingRunner):
    """Runs out of memory, after the forward has written its states, in the steps listed."""

    def __init__(self, runner: RecordingRunner, failing_steps: set[int]) -> None:
        super().__init__(runner.recorder.model, runner.caches)
        self.failing_steps = failing_steps
        self.num_calls = 0
        self.error: Exception = torch.OutOfMemoryError("injected")

    def launch(self, output: SchedulerOutput) -> StepInFlight:
        self.num_calls += 1
        step = super().launch(output)
        if self.num_calls in self.failing_steps:
            raise self.error
        return step


def failing(stepper: Stepper, *failing_steps: int) -> FailingRunner:
    runner = FailingRunner(stepper.runner, set(failing_steps))
    stepper.core._runner = runner
    return runner


def out_of_host_memory() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("injected"), MemoryError("injected"), out_of_host_memory()])
def test_12_every_kind_of_running_out_is_recognised(tiny: LoadedModel, error: Exception) -> None:
    stepper = Stepper(tiny)
    failing(stepper, 1).error = error
    request = stepper.add(random_prompt(36, 20), EIGHT)
    stepper.run()
    assert request.finish_reason is FinishReason.LENGTH


def test_another_error_of_a_step_is_not_taken_for_it(tiny: LoadedModel) -> None:
    stepper = Stepper(tiny)
    failing(stepper, 1).error = RuntimeError("a defect")
    stepper.add(random_prompt(36, 20), EIGHT)
    with pytest.raises(RuntimeError, match="a defect"):
        stepper.run()


@pytest.mark.parametrize("step", [1, 2, 4])
def test_12_a_step_out_of_memory_is_done_again(tiny: LoadedModel, step: int) -> None:
    prompts = [random_prompt(30, 100), random_prompt(31, 70)]
    stepper = Stepper(tiny, max_num_batched_tokens=128)
    failing(stepper, step)
    requests = [stepper.add(prompt, EIGHT) for prompt in prompts]
    for _ in range(step):
        stepper.step()
    assert stepper.scheduler.num_running == 0
    assert stepper.blocks.num_held == stepper.slots.num_held == 0
    stepper.run()
    assert [r.output_token_ids for r in requests] == [straight_line(tiny, prompt, 8).token_ids for prompt in prompts]


def test_12_a_request_that_never_fits_ends_and_the_others_go_on(tiny: LoadedModel) -> None:
    stepper = Stepper(tiny)
    first = stepper.add(random_prompt(32, 20), EIGHT)
    second = stepper.add(random_prompt(33, 20), EIGHT)
    failing(stepper, 1, 2, 3)
    stepper.run()
    assert second.finish_reason is FinishReason.ERROR
    assert isinstance(second.error, CapacityError)
    assert first.finish_reason is FinishReason.LENGTH
    assert first.output_token_ids == straight_line(tiny, random_prompt(32, 20), 8).token_ids


def test_12_slots_that_run_out_after_blocks_were_taken_requeue_the_request(tiny: LoadedModel) -> None:
    """The second request gets blocks but no slot: it waits, and holds nothing meanwhile."""
    stepper = Stepper(tiny, num_slots=2)
    stepper.slots.allocate_one("somebody")
    requests = [stepper.add(random_prompt(34 + i, 70), EIGHT) for i in range(2)]
    stepper.core.step()
    assert [request.status for request in requests] == [RequestStatus.RUNNING, RequestStatus.WAITING]
    assert stepper.blocks.num_held == 2
    stepper.slots.free("somebody")
    stepper.run()
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


def test_14_more_requests_than_slots_are_clamped_with_a_warning_that_says_the_number(tiny_folder: Path) -> None:
    with Engine.load(str(tiny_folder), max_num_seqs=1, max_model_len=64, max_snapshots=0, **PLACE.options) as one:
        memory = one.describe()["memory"]
    budget = 3 * memory["bytes_per_slot"] + 3 * memory["bytes_per_block"]
    with pytest.warns(DeltafoldWarning, match=r"max_num_seqs .*\b50\b.*\b3\b"):
        engine = Engine.load(str(tiny_folder), max_num_seqs=50, max_model_len=64, **{**PLACE.options, "memory": budget})
    with engine:
        assert engine.describe()["limits"]["max_num_seqs"] == 3
        completions = engine.complete_tokens([random_prompt(i, 20) for i in range(7)], EIGHT)
        assert [c.finish_reason for c in completions] == [FinishReason.LENGTH] * 7


@pytest.mark.parametrize("memory", [200_000, 700_000, 3_000_000])
@pytest.mark.parametrize("max_model_len", [None, 128])
@pytest.mark.filterwarnings("ignore::deltafold.errors.DeltafoldWarning")
def test_15_the_capacity_printed_is_what_one_request_can_use(
    tiny_folder: Path, memory: int, max_model_len: int | None
) -> None:
    options = {"max_num_seqs": 4, "memory": memory, "max_model_len": max_model_len}
    with Engine.load(str(tiny_folder), **{**PLACE.options, **options}) as engine:
        report = engine.describe()["memory"]
        assert report["allocated_bytes"] == report["planned_bytes"] <= memory == report["budget"]
        limit = engine.max_model_len
        assert limit == engine.describe()["limits"]["max_model_len"] == report["max_model_len"]
        if max_model_len is None:
            assert limit == min(report["num_cache_tokens"], 4096)
        else:
            assert limit == max_model_len <= report["num_cache_tokens"]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2)
        completion = engine.complete_tokens(random_prompt(0, limit - 2), params)
        assert completion.usage.num_prompt_tokens + completion.usage.num_output_tokens == limit
        with pytest.raises(ValueError, match=rf"\b{limit + 1}\b.*\b{limit}\b"):
            engine.complete_tokens(random_prompt(0, limit - 1), params)


def test_16_a_short_request_holds_one_block_and_one_slot(tiny: LoadedModel) -> None:
    """Whatever it may still grow to."""
    stepper = Stepper(tiny, num_blocks=1000)
    request = stepper.add(random_prompt(0, 12), SamplingParams(temperature=0, ignore_eos=True))
    for num_output_tokens in range(1, 53):
        stepper.step()
        assert request.num_output_tokens == num_output_tokens
        assert (stepper.blocks.num_held, stepper.slots.num_held) == (1, 1)
    stepper.step()
    stepper.step()
    assert (stepper.blocks.num_held, stepper.slots.num_held) == (2, 1)


class CountBytes(TorchDispatchMode):
    """Sums the bytes of every tensor that an operation makes; views of the caches, written in place, are none."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        super().__init__()
        self.num_bytes = 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in cache_tensors(caches)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.num_bytes += tensor.nbytes
        return out


def test_17_a_step_s_memory_does_not_grow_with_max_model_len(tiny: LoadedModel) -> None:
    counted = []
    for max_model_len in (65_536, 1_048_576):
        stepper = Stepper(tiny, num_blocks=max_model_len // 64, num_slots=1)
        stepper.max_model_len = max_model_len
        stepper.add(random_prompt(0, 100), SamplingParams(temperature=0, ignore_eos=True, max_tokens=None))
        with CountBytes(stepper.caches) as count:
            for _ in range(4):
                stepper.step()
        assert count.num_bytes > 0
        counted.append(count.num_bytes)
    assert counted[0] == counted[1]


def test_25_packed_prompts_do_not_leak_into_each_other(tiny: LoadedModel) -> None:
    """[A | B] and [B | A] in one step against A and B alone; the conv's taps and the state cross no border."""
    pair = [random_prompt(40, 67), random_prompt(41, 3)]
    alone = [straight_line(tiny, prompt, 2) for prompt in pair]
    for order in ((0, 1), (1, 0)):
        stepper = Stepper(tiny)
        requests = [stepper.add(pair[i], replace(EIGHT, max_tokens=2)) for i in order]
        stepper.run()
        assert len(stepper.runner.outputs[0].scheduled) == 2
        for i, request in zip(order, requests, strict=True):
            error = (stepper.logits_of(request) - alone[i].logits).abs().max()
            assert float(error) <= 1e-4 * float(alone[i].logits.abs().max())


RELEASE = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    **base_config(
        num_hidden_layers=27,
        linear_attn_config={
            "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    ),
}


def test_33_layer_lists_are_one_based() -> None:
    specs = KimiLinear.layer_specs(parse_config(RELEASE))
    assert [i for i, spec in enumerate(specs) if spec.latent_dim] == [3, 7, 11, 15, 19, 23, 26]
    assert [i for i, spec in enumerate(specs) if spec.recurrent_shape] == [
        i for i in range(27) if i not in (3, 7, 11, 15, 19, 23, 26)
    ]


@pytest.mark.parametrize("layer_id", [0, 28])
@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers"])
def test_33_layer_ids_out_of_range_are_refused(key: str, layer_id: int) -> None:
    linear = dict(RELEASE["linear_attn_config"])
    linear[key] = [*linear[key], layer_id]
    with pytest.raises(ConfigError, match=rf"{key}.*\b{layer_id}\b.*1\.\.27"):
        parse_config(RELEASE | {"linear_attn_config": linear})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_34_every_architecture_loads_and_generates(architecture: str, tmp_path: Path) -> None:
    WRITERS[architecture](tmp_path)
    assert load_config(tmp_path).architecture == architecture
    with Engine.load(str(tmp_path), device="cpu") as engine:
        assert engine.describe()["model"]["architecture"] == architecture
        completion = engine.complete("In the beginning", EIGHT)
    assert completion.usage.num_output_tokens == 8


def change_tensors(folder: Path, change: Mapping[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_35_missing_and_foreign_tensors_are_named_together(folder: Path) -> None:
    missing = ("model.layers.0.self_attn.A_log", "model.layers.2.self_attn.kv_b_proj.weight")
    foreign = ("model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.q_proj.weight_scale")
    change_tensors(folder, dict.fromkeys(missing) | {name: torch.ones(1) for name in foreign})
    with pytest.raises(WeightsError) as caught:
        Engine.load(str(folder), device="cpu")
    for name in (*missing, *foreign):
        assert name in str(caught.value)


def test_35_a_quantised_checkpoint_is_refused_by_name(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ConfigError, match="fp8"):
        Engine.load(str(folder), device="cpu")


def test_35_another_architecture_is_refused_by_name(folder: Path) -> None:
    change_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*KimiLinearForCausalLM"):
        Engine.load(str(folder), device="cpu")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tiktoken.model"])
def test_35_an_absent_file_is_a_load_error(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(LoadError):
        Engine.load(str(folder), device="cpu")


def test_36_code_in_the_folder_is_never_run(folder: Path) -> None:
    names = ("modeling_kimi", "configuration_kimi", "tokenization_kimi")
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')\nraise SystemExit(1)\n")
    change_config(
        folder, auto_map={"AutoModelForCausalLM": "modeling_kimi.X", "AutoConfig": "configuration_kimi.KimiConfig"}
    )
    with Engine.load(str(folder), device="cpu") as engine:
        assert engine.complete("In the beginning", EIGHT).usage.num_output_tokens == 8
    assert not (folder / "was_run").exists()
    assert not any(name.rpartition(".")[2] in names for name in sys.modules)


@pytest.mark.parametrize("name", ["[EOS]", "<|im_end|>"])
def test_38_both_end_tokens_stop_and_neither_is_in_the_text(engine: Engine, name: str) -> None:
    end = special_id(name)
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100})
    completion = engine.complete("In the beginning", params)
    assert (completion.token_ids, completion.text) == ((end,), "")
    assert completion.finish_reason is FinishReason.STOP
    ignoring = engine.complete("In the beginning", replace(params, ignore_eos=True))
    assert (ignoring.token_ids, ignoring.text) == ((end,) * 5, "")
    assert ignoring.finish_reason is FinishReason.LENGTH


def test_nan_logits_end_that_request_only(tiny: LoadedModel) -> None:
    """NaN in one request's state: it ends with an error and no token of it; its neighbour does not notice."""
    stepper = Stepper(tiny)
    good, bad = (stepper.add(random_prompt(50 + i, 70), EIGHT) for i in range(2))

    def spoil() -> None:
        if bad.num_output_tokens == 3 and bad.state_slot is not None:
            for cache in stepper.caches:
                if cache.recurrent_state is not None:
                    cache.recurrent_state[bad.state_slot] = float("nan")

    stepper.run(spoil)
    assert good.output_token_ids == straight_line(tiny, random_prompt(50, 70), 8).token_ids
    assert bad.output_token_ids == straight_line(tiny, random_prompt(51, 70), 3).token_ids
    assert bad.finish_reason is FinishReason.ERROR
    assert isinstance(bad.error, NumericalError)


def test_11_random_submits_aborts_and_failures_leak_nothing(tiny: LoadedModel) -> None:
    """150 steps of the real core; `tests/scheduler` has a thousand without tensors."""
    draw = random.Random(4)
    stepper = Stepper(tiny, num_blocks=8, num_slots=3, max_num_batched_tokens=64, max_snapshots=2, host_memory=2**18)
    runner = failing(stepper, *draw.sample(range(1, 150), 12))
    alive: list[Request] = []
    for _ in range(150):
        if draw.random() < 0.3:
            params = replace(EIGHT, max_tokens=draw.randint(1, 40))
            alive.append(stepper.add(random_prompt(draw.randrange(6), draw.randint(1, 150)), params))
        if alive and draw.random() < 0.1:
            stepper.core.abort(alive.pop(draw.randrange(len(alive))).request_id)
            stepper.scheduler.check()
        stepper.step()
    assert runner.num_calls > 100
    stepper.run()
    assert all(request.status is RequestStatus.FINISHED for request in alive)


def test_config_of_the_oracle_round_trips(tmp_path: Path) -> None:
    """What transformers wrote is what the loader read, in every number."""
    config = base_config(
        q_lora_rank=20, num_shared_experts=2, num_expert_group=2, topk_group=1, first_k_dense_replace=2
    )
    write_checkpoint(tmp_path, config)
    read: ModelConfig = load_config(tmp_path)
    assert read.mla is not None
    assert read.moe is not None
    assert read.linear_attention is not None
    assert (read.mla.q_lora_rank, read.mla.kv_lora_rank, read.mla.v_head_dim) == (20, 24, 12)
    assert (read.moe.num_experts, read.moe.num_shared_experts, read.moe.num_groups) == (6, 2, 2)
    assert [str(kind) for kind in read.mlp_types] == ["dense", "dense", "sparse", "sparse"]
    assert (read.linear_attention.num_key_heads, read.linear_attention.conv_kernel_size) == (3, 4)
    assert read.moe.routed_scaling_factor == 2.446
