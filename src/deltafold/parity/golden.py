"""A golden run: prompts, the tokens one engine chose, and the most likely tokens at every step; its file and checks.

`record.py` makes it, `compare.py` holds an engine to it. Every field of a file is checked before it is used, and each
prompt carries a digest, so that an edit is refused by name instead of becoming a wrong verdict.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from deltafold import LOGPROB_FLOOR, GoldenError

FORMAT = "deltafold.golden"
VERSION = 1
NUM_TOP = 20
"""Most likely tokens kept at each step, the chosen one among them."""

DTYPES = ("float32", "bfloat16", "unknown")
"""What a golden run may have been computed in; a server does not say."""

ENGINES = ("deltafold", "transformers", "openai")

_ORDER_SLACK = 1e-5
"""How far out of order neighbouring logprobs may be (nats): files keep six decimals."""

_SUM_SLACK = 1e-3
"""How far the probabilities of the most likely tokens may exceed 1 together."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GoldenStep:
    """One chosen token, its log-probability (nats), and the NUM_TOP most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @property
    def margin(self) -> float:
        """How much more likely the best token is than the second (nats)."""
        return self.top[0][1] - self.top[1][1]


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """One prompt and what followed it. `text` is None where the prompt was given as ids."""

    text: str | None
    token_ids: tuple[int, ...]
    steps: tuple[GoldenStep, ...]

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(step.token_id for step in self.steps)


@dataclass(frozen=True, slots=True)
class Origin:
    """Which engine computed a golden run, and how."""

    engine: str  # one of ENGINES
    engine_version: str
    torch: str
    dtype: str  # one of DTYPES
    residual_dtype: str  # one of DTYPES
    backend: str
    device: str


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which weights and which tokenizer. Fingerprints are hexadecimal."""

    name: str
    fingerprint: str
    vocab_size: int
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Golden:
    """A golden run. `max_tokens` steps a prompt, fewer only where an end token was chosen and `ignore_eos` is false."""

    origin: Origin
    model: ModelIdentity
    max_tokens: int
    ignore_eos: bool
    prompts: tuple[GoldenPrompt, ...]

    @property
    def num_tokens(self) -> int:
        """Chosen tokens of all prompts."""
        return sum(len(prompt.steps) for prompt in self.prompts)


def save(golden: Golden, path: Path) -> None:
    """Writes the file, one step a line. GoldenError if what was recorded is not a golden run."""
    document = to_json(golden)
    from_json(document, path.name)
    header = {name: value for name, value in document.items() if name != "prompts"}
    lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}," for name, value in header.items()]
    prompts = []
    for prompt in document["prompts"]:
        fields = {name: value for name, value in prompt.items() if name != "steps"}
        head = ", ".join(
            f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()
        )
        steps = ",\n".join(f"      {json.dumps(step, separators=(',', ':'))}" for step in prompt["steps"])
        prompts.append(f'    {{{head}, "steps": [\n{steps}\n    ]}}')
    path.write_text("\n".join(["{", *lines, '  "prompts": [', ",\n".join(prompts), "  ]", "}", ""]), encoding="utf-8")


def load(path: Path) -> Golden:
    """Reads and checks a file; GoldenError names the field that is wrong."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise GoldenError(f"{path}: not JSON: {error}") from error
    return from_json(document, str(path))


def to_json(golden: Golden) -> dict[str, Any]:
    """Plain values, digests included; logprobs are rounded to six decimals."""
    prompts = []
    for prompt in golden.prompts:
        body: dict[str, Any] = {
            "text": prompt.text,
            "token_ids": list(prompt.token_ids),
            "steps": [
                {
                    "token_id": step.token_id,
                    "logprob": round(step.logprob, 6),
                    "top": [[token_id, round(logprob, 6)] for token_id, logprob in step.top],
                }
                for step in prompt.steps
            ],
        }
        prompts.append({"digest": _digest(body), **body})
    origin, model = golden.origin, golden.model
    header = {
        "format": FORMAT,
        "version": VERSION,
        "origin": {name: getattr(origin, name) for name in Origin.__slots__},
        "model": {name: getattr(model, name) for name in ModelIdentity.__slots__},
        "max_tokens": golden.max_tokens,
        "ignore_eos": golden.ignore_eos,
    }
    return {**header, "digest": _header_digest(header, prompts), "prompts": prompts}


def from_json(document: object, where: str) -> Golden:
    """The reverse of `to_json`; GoldenError names the first field that is missing, unknown, wrong or edited."""
    names = ("format", "version", "origin", "model", "max_tokens", "ignore_eos", "digest", "prompts")
    if isinstance(document, Mapping):
        if document.get("format") != FORMAT:
            raise GoldenError(f"{where}: format must be {FORMAT!r}, got {document.get('format')!r}")
        if document.get("version") != VERSION:
            raise GoldenError(f"{where}: version must be {VERSION}, got {document.get('version')!r}")
    fields = _object(document, where, names)
    golden = Golden(
        origin=_origin(fields["origin"], f"{where}: origin"),
        model=_model(fields["model"], f"{where}: model"),
        max_tokens=_integer(fields["max_tokens"], f"{where}: max_tokens", 1),
        ignore_eos=_typed(fields["ignore_eos"], f"{where}: ignore_eos", bool),
        prompts=(),
    )
    raw = _typed(fields["prompts"], f"{where}: prompts", list)
    if not raw:
        raise GoldenError(f"{where}: prompts is empty")
    prompts = tuple(_prompt(item, f"{where}: prompts[{i}]", golden) for i, item in enumerate(raw))
    header = {name: value for name, value in fields.items() if name not in ("digest", "prompts")}
    if fields["digest"] != _header_digest(header, raw):
        raise GoldenError(f"{where}: digest does not fit: a field outside the prompts, or their number, was edited")
    return Golden(golden.origin, golden.model, golden.max_tokens, golden.ignore_eos, prompts)


def _origin(value: object, where: str) -> Origin:
    fields = _object(value, where, Origin.__slots__)
    origin = Origin(**{name: _text(fields[name], f"{where}.{name}") for name in Origin.__slots__})
    _choice(origin.engine, f"{where}.engine", ENGINES)
    _choice(origin.dtype, f"{where}.dtype", DTYPES)
    _choice(origin.residual_dtype, f"{where}.residual_dtype", DTYPES)
    return origin


def _model(value: object, where: str) -> ModelIdentity:
    fields = _object(value, where, ModelIdentity.__slots__)
    return ModelIdentity(
        name=_text(fields["name"], f"{where}.name"),
        fingerprint=_hexadecimal(fields["fingerprint"], f"{where}.fingerprint"),
        vocab_size=_integer(fields["vocab_size"], f"{where}.vocab_size", 2),
        tokenizer=_hexadecimal(fields["tokenizer"], f"{where}.tokenizer"),
    )


def _prompt(value: object, where: str, golden: Golden) -> GoldenPrompt:
    fields = _object(value, where, ("digest", "text", "token_ids", "steps"))
    vocab_size = golden.model.vocab_size
    text = None if fields["text"] is None else _typed(fields["text"], f"{where}.text", str)
    raw_ids = _typed(fields["token_ids"], f"{where}.token_ids", list)
    if not raw_ids:
        raise GoldenError(f"{where}.token_ids is empty")
    token_ids = tuple(_token_id(item, f"{where}.token_ids[{i}]", vocab_size) for i, item in enumerate(raw_ids))
    raw_steps = _typed(fields["steps"], f"{where}.steps", list)
    steps = tuple(_step(item, f"{where}.steps[{i}]", vocab_size) for i, item in enumerate(raw_steps))
    if len(steps) > golden.max_tokens or not steps or (golden.ignore_eos and len(steps) < golden.max_tokens):
        kind = "exactly" if golden.ignore_eos else "1 to"
        raise GoldenError(f"{where}.steps must be {kind} {golden.max_tokens} (max_tokens), got {len(steps)}")
    body = {name: fields[name] for name in ("text", "token_ids", "steps")}
    if fields["digest"] != _digest(body):
        raise GoldenError(f"{where}: digest does not fit: the prompt, its ids or its logprobs were edited")
    return GoldenPrompt(text, token_ids, steps)


def _step(value: object, where: str, vocab_size: int) -> GoldenStep:
    fields = _object(value, where, ("token_id", "logprob", "top"))
    token_id = _token_id(fields["token_id"], f"{where}.token_id", vocab_size)
    logprob = _logprob(fields["logprob"], f"{where}.logprob")
    raw = _typed(fields["top"], f"{where}.top", list)
    wanted = min(NUM_TOP, vocab_size)
    if len(raw) != wanted:
        raise GoldenError(f"{where}.top must have {wanted} entries, got {len(raw)}")
    top = []
    for i, item in enumerate(raw):
        pair = _typed(item, f"{where}.top[{i}]", list)
        if len(pair) != 2:
            raise GoldenError(f"{where}.top[{i}] must be [token id, logprob], got {item!r}")
        top.append((_token_id(pair[0], f"{where}.top[{i}]", vocab_size), _logprob(pair[1], f"{where}.top[{i}]")))
    if len({found for found, _ in top}) != wanted:
        raise GoldenError(f"{where}.top names a token twice")
    for i in range(1, wanted):
        if top[i][1] > top[i - 1][1] + _ORDER_SLACK:
            raise GoldenError(f"{where}.top[{i}]: logprob {top[i][1]} is above the entry before it, {top[i - 1][1]}")
    if (total := sum(math.exp(found) for _, found in top)) > 1 + _SUM_SLACK:
        raise GoldenError(f"{where}.top: the probabilities add up to {total:.4f}, more than 1")
    if abs(dict(top).get(token_id, -math.inf) - logprob) > _ORDER_SLACK:
        raise GoldenError(f"{where}.token_id: {token_id} with logprob {logprob} is not among the most likely tokens")
    if logprob < top[0][1] - _ORDER_SLACK:
        raise GoldenError(
            f"{where}.token_id: a golden run is greedy, and {token_id} is less likely than {top[0][0]} "
            f"({logprob} < {top[0][1]})"
        )
    return GoldenStep(token_id, logprob, tuple(top))


def _object(value: object, where: str, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a JSON object that must have exactly `names`."""
    if not isinstance(value, dict):
        raise GoldenError(f"{where} must be an object, got {type(value).__name__}")
    if missing := [name for name in names if name not in value]:
        raise GoldenError(f"{where}: missing {', '.join(missing)}")
    if unknown := [str(name) for name in value if name not in names]:
        raise GoldenError(f"{where}: unknown {', '.join(unknown)}")
    return value


def _typed(value: object, where: str, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise GoldenError(f"{where} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def _text(value: object, where: str) -> str:
    if not (text := _typed(value, where, str)):
        raise GoldenError(f"{where} is empty")
    return text


def _choice(value: str, where: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise GoldenError(f"{where} must be one of {', '.join(choices)}, got {value!r}")


def _hexadecimal(value: object, where: str) -> str:
    text = _typed(value, where, str)
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise GoldenError(f"{where} must be 32 hexadecimal digits, got {text!r}")
    return text


def _integer(value: object, where: str, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise GoldenError(f"{where} must be an integer >= {low}, got {value!r:.80}")
    return value


def _token_id(value: object, where: str, vocab_size: int) -> int:
    token_id = _integer(value, where, 0)
    if token_id >= vocab_size:
        raise GoldenError(f"{where}: token id {token_id} is outside the vocabulary of {vocab_size}")
    return token_id


def _logprob(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GoldenError(f"{where}: logprob must be a number, got {value!r:.80}")
    if not LOGPROB_FLOOR <= value <= _ORDER_SLACK:
        raise GoldenError(f"{where}: logprob must be in [{LOGPROB_FLOOR}, 0], got {value!r}")
    return float(value)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _header_digest(header: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> str:
    return _digest([dict(header), [prompt["digest"] for prompt in prompts]])


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
