"""Request and response bodies of the HTTP interface, and how a request becomes `SamplingParams`.

Types only: the limits of a sampling value have one owner, `SamplingParams`. Unknown fields are refused by name;
fields of OpenAI's interface that deltafold lacks are listed with the values at which they mean nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deltafold import RequestError, SamplingParams

MAX_PROMPTS = 2048
"""Most prompts in one completions call."""

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completions call that does not say; chat goes on to the model's limit instead."""

INERT_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Fields that deltafold does not have -> the values accepted because they ask for nothing."""

_OWN_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "n",
)  # fmt: skip


def _inert(name: str) -> Any:
    return Field(None, description="Not supported.", json_schema_extra={"enum": list(INERT_VALUES[name])})


def _is_same(value: Any, inert: Any) -> bool:
    # 0 == False and 1 == True in Python, not in JSON
    return type(value) is type(inert) and value == inert


def impossible(name: str, message: str) -> PydanticCustomError:
    """Fields that do not go together; `name` is the one to blame."""
    return PydanticCustomError("impossible_combination", message, {"name": name})


class WireModel(BaseModel):
    """A body as it is on the wire: strict types, no unknown field, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(WireModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, Field(description="Padding is never added.")] = None


class GenerationRequest(WireModel):
    """The fields that completions and chat share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id, in decimal digits -> bias.")
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Any = _inert("store")
    service_tier: Any = _inert("service_tier")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_has_an_effect(cls, body: Any) -> Any:
        for name in INERT_VALUES.keys() & (body.keys() if isinstance(body, dict) else ()):
            if name not in cls.model_fields:
                continue
            if not any(_is_same(body[name], inert) for inert in INERT_VALUES[name]):
                raise PydanticCustomError("unsupported_field", "{name} is not supported by deltafold", {"name": name})
        return body

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise impossible("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _sampling_params(self, **extra: Any) -> SamplingParams:
        given = {name: value for name in _OWN_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_bias_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**given, **extra)


def _bias_token_id(key: str) -> int:
    if re.fullmatch(r"[0-9]{1,12}", key) is None:
        raise RequestError(f"logit_bias keys must be token ids in decimal digits, got {key!r}", param="logit_bias")
    return int(key)


TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]
PromptField = Annotated[
    str
    | TokenIds
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)],
    Field(union_mode="left_to_right", description="A text, a list of texts, token ids, or a list of lists of them."),
]


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    best_of: Any = _inert("best_of")
    suffix: Any = _inert("suffix")
    response_format: Any = _inert("response_format")

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt is to be echoed and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            RequestError: naming the field, its value and the limit.
        """
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be >= 1 without echo, got 0", param="max_tokens")
        if self.echo and self.stream and self.logprobs is not None:
            raise RequestError("logprobs of an echoed prompt cannot be streamed", param="logprobs")
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling_params(
            max_tokens=1 if self.is_scoring else max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class TextPart(WireModel):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class SystemMessage(WireModel):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(WireModel):
    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(WireModel):
    name: str
    arguments: str


class ToolCall(WireModel):
    """A call of an earlier turn; deltafold makes none itself."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(WireModel):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class ToolMessage(WireModel):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = Field(None, description="No effect: there are no tools.")

    audio: Any = _inert("audio")
    function_call: Any = _inert("function_call")
    functions: Any = _inert("functions")
    modalities: Any = _inert("modalities")
    moderation: Any = _inert("moderation")
    prediction: Any = _inert("prediction")
    reasoning_effort: Any = _inert("reasoning_effort")
    response_format: Any = _inert("response_format")
    tool_choice: Any = _inert("tool_choice")
    tools: Any = _inert("tools")
    verbosity: Any = _inert("verbosity")
    web_search_options: Any = _inert("web_search_options")

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            RequestError: naming the field, its value and the limit.
        """
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise RequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ",
                param="max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(max_tokens=limits.pop() if limits else None, logprobs=logprobs)


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as `Engine.chat_token_ids` takes them, with what was not sent left out; "developer" is "system"."""
    dumped = [message.model_dump(exclude_none=True) for message in messages]
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in dumped]


class TokenizeRequest(WireModel):
    """Body of `POST /tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise impossible("prompt", "exactly one of prompt and messages is needed")
        return self


class DetokenizeRequest(WireModel):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    prompt: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not a success has this shape."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageResponse(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


WireFinishReason = Literal["stop", "length", "abort"]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageResponse


class ChatTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class ChatAnswer(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: WireFinishReason


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageResponse


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(BaseModel):
    status: Literal["ok"]


class VersionResponse(BaseModel):
    version: str
    api_version: int
