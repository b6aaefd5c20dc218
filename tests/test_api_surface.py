"""The public names and signatures, pinned. A change here is a change of API_VERSION or a line in CHANGELOG.md."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import random_prompt

import deltafold
from deltafold import DeviceError, Engine, OptionError, RequestError, SamplingParams

NAMES = [
    "API_VERSION",
    "AsyncTokenStream",
    "CapacityError",
    "CapacityPlan",
    "ChatMessage",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "DeltafoldError",
    "DeltafoldWarning",
    "DeviceError",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "FinishReason",
    "GoldenError",
    "InvalidTokenError",
    "KernelPackError",
    "LOGPROB_FLOOR",
    "LoadError",
    "MAX_STOP_STRINGS",
    "MAX_TOP_LOGPROBS",
    "NumericalError",
    "OptionError",
    "Prompt",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "Session",
    "SessionError",
    "SessionStream",
    "TokenLogprob",
    "TokenOutput",
    "TokenStream",
    "TokenizerError",
    "TopLogprob",
    "UnsupportedOptionError",
    "Usage",
    "WeightsError",
    "__version__",
    "build_kernels",
    "check_kernels",
    "convert_tokenizer",
    "plan_capacity",
    "tune_kernels",
]

SIGNATURES = {
    "load": "model='builtin', *, device='auto', dtype='auto', residual_dtype='float32', max_num_seqs=64, "
    "max_num_batched_tokens=2048, max_model_len=None, max_waiting=None, memory=None, seed=None, prefix_cache=True, "
    "max_snapshots=64, snapshot_interval=4096, host_memory=1073741824, decode_graphs=True, "
    "free_memory_floor=0.06, weights='checkpoint', backend=None, kernel_pack=None, revision=None, "
    "show_progress=None",
    "complete": "self, prompt, params=None",
    "complete_tokens": "self, token_ids, params=None",
    "chat": "self, messages, params=None",
    "stream": "self, prompt, params=None, *, request_id=None",
    "astream": "self, prompt, params=None, *, request_id=None",
    "acomplete": "self, prompts, params=None, *, request_id=None",
    "session": "self",
    "restore": "self, path",
    "fork": "self, session",
    "abort": "self, request_id",
    "encode": "self, text",
    "decode": "self, token_ids, *, skip_special_tokens=True",
    "token_bytes": "self, token_id",
    "chat_token_ids": "self, messages, *, add_generation_prompt=True, tools=None",
    "describe": "self",
    "stats": "self",
    "close": "self",
}
PROPERTIES = {"model_name", "max_model_len", "vocab_size", "is_alive"}
COROUTINES = {"acomplete"}

FIELDS = {
    "SamplingParams": "*, max_tokens=None, n=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, "
    "frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=..., seed=None, stop=(), stop_token_ids=(), "
    "ignore_eos=False, logprobs=None, prompt_logprobs=None, cache_salt=''",
    "Completion": "request_id, index, text, prompt_token_ids, token_ids, finish_reason, usage, stop_reason=None, "
    "logprobs=None, prompt_logprobs=None, error=None",
    "TokenOutput": "request_id, index, text, token_ids, logprobs=None, finish_reason=None, usage=None",
    "TokenLogprob": "token_id, logprob, rank, top",
    "TopLogprob": "token_id, logprob",
    "Usage": "num_prompt_tokens, num_output_tokens, num_cached_tokens",
}

ERROR_TREE = {
    "DeltafoldError": Exception,
    "RequestError": deltafold.DeltafoldError,
    "UnsupportedOptionError": deltafold.RequestError,
    "InvalidTokenError": deltafold.RequestError,
    "ContextLengthError": deltafold.RequestError,
    "LoadError": deltafold.DeltafoldError,
    "ConfigError": deltafold.LoadError,
    "WeightsError": deltafold.LoadError,
    "TokenizerError": deltafold.LoadError,
    "SessionError": deltafold.LoadError,
    "KernelPackError": deltafold.DeltafoldError,
    "GoldenError": deltafold.DeltafoldError,
    "OptionError": deltafold.DeltafoldError,
    "DeviceError": deltafold.DeltafoldError,
    "CapacityError": deltafold.DeltafoldError,
    "QueueFullError": deltafold.DeltafoldError,
    "NumericalError": deltafold.DeltafoldError,
    "EngineClosedError": deltafold.DeltafoldError,
    "DeltafoldWarning": UserWarning,
}


def signature_of(function: Callable[..., Any], skip: int = 0) -> str:
    """Names, kinds and defaults, without types."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    parts: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL), "would swallow anything"
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(parameter.name + ("=..." if "factory" in default else default))
    return ", ".join(parts)


def test_the_package_has_these_names_and_no_others() -> None:
    assert sorted(deltafold.__all__) == sorted(NAMES)
    public = {name for name in dir(deltafold) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(deltafold, name))}
    assert public - modules == {name for name in NAMES if not name.startswith("_")}


def test_api_version() -> None:
    assert deltafold.API_VERSION == 1
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", deltafold.__version__)


def test_the_engine_has_these_methods_and_no_others() -> None:
    public = {name for name in vars(Engine) if not name.startswith("_")}
    assert public == SIGNATURES.keys() | PROPERTIES
    assert {name for name in public if isinstance(vars(Engine)[name], property)} == PROPERTIES
    assert {name for name in public if inspect.iscoroutinefunction(vars(Engine)[name])} == COROUTINES


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature_of(getattr(Engine, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    kind = getattr(deltafold, name)
    assert dataclasses.is_dataclass(kind)
    assert signature_of(kind) == FIELDS[name]
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        setattr(object.__new__(kind), dataclasses.fields(kind)[0].name, 1)


@pytest.mark.parametrize("name", ERROR_TREE)
def test_the_error_tree(name: str) -> None:
    assert getattr(deltafold, name).__bases__[0] is ERROR_TREE[name]


def test_request_and_option_errors_are_value_errors() -> None:
    assert issubclass(RequestError, ValueError)
    assert issubclass(OptionError, ValueError)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.isupper() and name not in ("Prompt",)])
def test_public_names_are_documented(name: str) -> None:
    value = getattr(deltafold, name)
    assert name in ("ChatMessage", "__version__") or inspect.getdoc(value)


def test_a_cpu_engine_never_looks_for_an_accelerator(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probed(*args: object, **kwargs: object) -> bool:
        raise AssertionError("an accelerator was looked for")

    for name in ("is_available", "device_count", "current_device", "mem_get_info", "get_device_capability", "init"):
        monkeypatch.setattr(torch.cuda, name, probed)
    for name in ("is_available", "current_accelerator", "device_count"):
        monkeypatch.setattr(torch.accelerator, name, probed)
    with Engine.load(str(tiny_folder), device="cpu") as engine:
        assert engine.describe()["device"] == "cpu"
        engine.complete_tokens([5, 6], SamplingParams(max_tokens=2, temperature=0))
    with pytest.raises(AssertionError, match="looked for"):
        Engine.load(str(tiny_folder), device="auto")


def test_cuda_without_a_device_fails_before_any_file_is_read(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    opened: list[object] = []
    real_open = builtins.open

    def spy(file: object, *args: Any, **kwargs: Any) -> Any:
        opened.append(file)
        return real_open(file, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "open", spy)
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self))
    monkeypatch.setattr(Path, "is_dir", lambda self: opened.append(self))
    for model in (str(tiny_folder), "no/such/model"):
        with pytest.raises(DeviceError, match="cuda"):
            Engine.load(model, device="cuda")
    assert opened == []


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("device", "gpu", "auto, cpu, cuda"),
        ("device", None, "auto, cpu, cuda"),
        ("dtype", "float16", "auto, float32, bfloat16"),
        ("dtype", torch.float32, "auto, float32, bfloat16"),
        ("residual_dtype", "auto", "float32, bfloat16"),
        ("backend", "cutlass", "portable"),
        ("backend", "", "portable"),
        ("max_num_seqs", 0, ">= 1"),
        ("max_num_seqs", None, ">= 1"),
        ("max_num_seqs", 2.0, ">= 1"),
        ("max_num_seqs", True, ">= 1"),
        ("max_num_batched_tokens", 63, ">= 64"),
        ("max_model_len", 1, ">= 2"),
        ("max_model_len", "4096", ">= 2"),
        ("max_waiting", -1, ">= 0"),
        ("memory", 0, ">= 1"),
        ("memory", 1.5e9, ">= 1"),
        ("seed", 0.5, "integer"),
        ("prefix_cache", 1, "boolean"),
        ("max_snapshots", -1, ">= 0"),
        ("snapshot_interval", 100, "multiple of 64"),
        ("host_memory", -1, ">= 0"),
    ],
)
def test_a_wrong_load_option_names_itself_its_value_and_the_limit(name: str, value: Any, limit: str) -> None:
    with pytest.raises(OptionError) as caught:
        Engine.load("no/such/folder/at-all", **({"device": "cpu"} | {name: value}))
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert limit in message


@pytest.mark.parametrize("model", ["", 7, None, b"builtin"])
def test_a_model_that_is_no_name_is_a_typed_error(model: Any) -> None:
    with pytest.raises(deltafold.DeltafoldError, match=re.escape(repr(model))):
        Engine.load(model, device="cpu")


def test_unknown_keywords_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="tensor_parallel"):
        Engine.load("builtin", tensor_parallel=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    for name in ("complete", "complete_tokens", "chat", "stream", "astream", "acomplete"):
        with pytest.raises(TypeError, match="temperature"):
            getattr(Engine, name)(object(), "x", temperature=0)


BIG = 10**400
BAD_PARAMS = [
    ("max_tokens", 0, ">= 1"),
    ("max_tokens", 1.0, "integer"),
    ("max_tokens", True, "integer"),
    ("n", 0, "[1, 128]"),
    ("n", 129, "[1, 128]"),
    ("temperature", -0.1, "[0.0, 100.0]"),
    ("temperature", 100.5, "[0.0, 100.0]"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", "hot", "number"),
    ("temperature", None, "number"),
    ("temperature", BIG, "[0.0, 100.0]"),
    ("top_k", -1, ">= 0"),
    ("top_k", 1.5, "integer"),
    ("top_p", 0.0, "(0.0, 1.0]"),
    ("top_p", 1.01, "(0.0, 1.0]"),
    ("min_p", -0.01, "[0.0, 1.0]"),
    ("min_p", 2, "[0.0, 1.0]"),
    ("presence_penalty", 2.5, "[-2.0, 2.0]"),
    ("frequency_penalty", -2.5, "[-2.0, 2.0]"),
    ("repetition_penalty", 0, "(0.0, 100.0]"),
    ("repetition_penalty", -1.0, "(0.0, 100.0]"),
    ("seed", 2**63, str(2**63 - 1)),
    ("seed", "x", "integer"),
    ("logprobs", 65, "[0, 64]"),
    ("logprobs", -1, "[0, 64]"),
    ("logprobs", True, "integer"),
    ("prompt_logprobs", 65, "[0, 64]"),
    ("ignore_eos", 1, "boolean"),
    ("cache_salt", None, "string"),
    ("stop", "", "non-empty"),
    ("stop", ["a", ""], "non-empty"),
    ("stop", [3], "non-empty"),
    ("stop", None, "string"),
    ("stop", 5, "string"),
    ("stop_token_ids", [-1], ">= 0"),
    ("stop_token_ids", ["a"], "integer"),
    ("stop_token_ids", 7, "integer"),
    ("stop_token_ids", None, "integer"),
    ("logit_bias", {5: 101}, "[-100.0, 100.0]"),
    ("logit_bias", {5: float("nan")}, "finite"),
    ("logit_bias", {-1: 1.0}, ">= 0"),
    ("logit_bias", {"5": 1.0}, "integer"),
    ("logit_bias", [1, 2], "token id"),
    ("logit_bias", None, "token id"),
]


@pytest.mark.parametrize(("name", "value", "limit"), BAD_PARAMS, ids=lambda value: repr(value)[:24])
def test_a_bad_sampling_param_names_itself_its_value_and_the_limit(name: str, value: Any, limit: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.param == name
    assert name in message
    assert limit in message
    scalars = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else [value]
    assert any(repr(scalar) in message for scalar in [value, *scalars])


def test_too_many_stop_strings() -> None:
    with pytest.raises(RequestError, match=r"stop.*17.*16"):
        SamplingParams(stop=[str(i) for i in range(17)])
    assert len(SamplingParams(stop=[str(i) for i in range(16)]).stop) == 16


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(max_tokens=1, n=128, temperature=100, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(repetition_penalty=100, seed=-(2**63), logprobs=64, prompt_logprobs=0, logit_bias={0: -100, 1: 100})


def test_params_keep_what_they_were_given() -> None:
    bias, stop = {3: 1.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=iter([4, 5]))  # type: ignore[arg-type]
    bias[4], stop[0] = 9.0, "y"
    assert params.logit_bias == {3: 1.0}
    assert params.stop == ("x",)
    assert params.stop_token_ids == (4, 5)
    assert SamplingParams(stop="one").stop == ("one",)


@pytest.mark.parametrize("bad", [[], [4096], [-1], [1.0], [True], ["a"], [None], 7, None, "text", ["text"], [[1], 2]])
def test_bad_prompts_of_ids_are_request_errors(engine: Engine, bad: Any) -> None:
    with pytest.raises(RequestError):
        engine.complete_tokens(bad)


@pytest.mark.parametrize("bad", ["", [], [5], ["a", 5], 7, None, b"x", [""], "\ud800"])
def test_bad_prompts_of_text_are_request_errors(engine: Engine, bad: Any) -> None:
    with pytest.raises(RequestError):
        engine.complete(bad)


@pytest.mark.parametrize("bad", ["", [], None, 7, [[1]], ["a"]])
def test_bad_prompts_of_streams_are_request_errors(engine: Engine, bad: Any) -> None:
    with pytest.raises(RequestError):
        engine.stream(bad)


@pytest.mark.parametrize("params", [{"temperature": 0}, 0, "greedy", False])
def test_params_of_another_type_are_request_errors(engine: Engine, params: Any) -> None:
    for call in (engine.complete, engine.stream):
        with pytest.raises(RequestError, match="SamplingParams"):
            call("x", params)
    with pytest.raises(RequestError, match="SamplingParams"):
        engine.complete_tokens([1], params)


@pytest.mark.parametrize("request_id", ["", "a/b", 5, b"x"])
def test_bad_request_ids_are_request_errors(engine: Engine, request_id: Any) -> None:
    with pytest.raises(RequestError, match=re.escape(repr(request_id))):
        engine.stream("x", request_id=request_id)


def test_ids_outside_the_vocabulary_name_the_id_and_the_limit(engine: Engine) -> None:
    size = engine.vocab_size
    for call in (engine.complete_tokens, engine.decode, lambda ids: engine.token_bytes(ids[0])):
        for token_id in (size, -1, 2**40):
            with pytest.raises(deltafold.InvalidTokenError) as caught:
                call([token_id])
            assert str(token_id) in str(caught.value)
            assert str(size - 1) in str(caught.value)
    for name in ("stop_token_ids", "logit_bias"):
        params = SamplingParams(**{name: [size] if name == "stop_token_ids" else {size: 1.0}})
        with pytest.raises(deltafold.InvalidTokenError, match=name):
            engine.complete_tokens([1], params)


def test_context_overflow_has_both_numbers(engine: Engine) -> None:
    limit = engine.max_model_len
    with pytest.raises(deltafold.ContextLengthError) as caught:
        engine.complete_tokens(random_prompt(0, 10), SamplingParams(max_tokens=limit))
    assert str(limit + 10) in str(caught.value)
    assert str(limit) in str(caught.value).replace(str(limit + 10), "")
    with pytest.raises(deltafold.ContextLengthError, match=rf"has {limit} tokens.*max_model_len {limit}"):
        engine.complete_tokens([1] * limit)
