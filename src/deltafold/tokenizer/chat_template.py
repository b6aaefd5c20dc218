"""Chat templates: finding, sandboxing and rendering them, with user text kept apart from control tokens.

`tokenizer.py` turns the rendered text into ids. What the sandbox bounds: attributes, loop steps, text length.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from deltafold.errors import RequestError, TokenizerError
from deltafold.tokenizer import special_tokens

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_STEPS = 200_000
"""Most loop iterations and macro calls of one rendering."""

MAX_TEMPLATE_CHARS = 16_000_000
"""Longest text a template may make, in characters: far beyond any context length."""

_TOKEN_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_NOT_ASCII = re.compile(r"[^\0-\x7f\U000f0000-\U000ffffd]")
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")
_PYTHON_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)


class _RefusedError(TemplateError):
    """The template itself refused the messages, through `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    # Escaping spares placeholders: the characters they stand for are ASCII, or get lost as an escape's digits.
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _refuse_length(length: int) -> None:
    if length > MAX_TEMPLATE_CHARS:
        raise SecurityError(f"it makes a value of {length} characters or items, the limit is {MAX_TEMPLATE_CHARS}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox plus bounds on steps and on the size of values.

    Every loop body and macro is made to call `count_step`, and `~` to call `join`, when a template is parsed:
    Jinja2 itself intercepts only unary and binary operators.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.num_steps: ContextVar[int] = ContextVar("num_steps", default=0)

    def count_step(self) -> None:
        num_steps = self.num_steps.get() + 1
        if num_steps > MAX_TEMPLATE_STEPS:
            raise SecurityError(f"it runs for more than {MAX_TEMPLATE_STEPS} loop steps")
        self.num_steps.set(num_steps)

    def join(self, *parts: object) -> str:
        texts = [str(part) for part in parts]
        _refuse_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError(f"the format {left[:80]!r} has a width of more than four digits")
        if operator == "**":
            raise SecurityError("the operator ** is not available")
        sized = [value for value in (left, right) if hasattr(value, "__len__")]
        if operator == "+" and len(sized) == 2:
            _refuse_length(len(left) + len(right))
        if operator == "*" and len(sized) == 1:
            _refuse_length(len(sized[0]) * max(0, int(right if sized[0] is left else left)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):  # a width for str.ljust and its like
                _refuse_length(value)
        return super().call(context, called, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bodies: list[list[nodes.Node]] = [
            *(loop.body for loop in template.find_all(nodes.For)),
            *(macro.body for macro in template.find_all(nodes.Macro)),
        ]
        for body in bodies:
            body.insert(0, nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)))
        _ConcatToJoin().visit(template)
        return template


class _ConcatToJoin(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None)


def find_template(folder: Path) -> str:
    """The folder's template: chat_template.jinja, else `chat_template` of tokenizer_config.json (a string, or a
    list of named ones, of which `default` is taken).

    Raises:
        TokenizerError: there is none, or it is malformed.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read {path}: {error}") from error
    config = folder / special_tokens.CONFIG_FILE
    value = special_tokens.read_json(config).get("chat_template")
    if value is None:
        raise TokenizerError(f"{folder} has no chat template (no {TEMPLATE_FILE}, no chat_template in {config.name})")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        if "default" not in named:
            raise TokenizerError(
                f"{config}: chat_template has no template named 'default', only {sorted(map(str, named))}"
            )
        value = named["default"]
    if not isinstance(value, str):
        raise TokenizerError(f"{config}: chat_template must be a string, got {value!r}")
    return value


class ChatTemplate:
    """A folder's chat template; read and compiled on first use, so that a model without one still completes text.

    Raises:
        TokenizerError: (from `render`) no template, a syntax error, or one that breaks the sandbox's bounds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sandbox = _Sandbox()

    @cached_property
    def _template(self) -> jinja2.Template:
        source = find_template(self._folder)
        try:
            return self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template of {self._folder} is malformed, line {error.lineno}: {error}"
            ) from error
        except (TemplateError, *_PYTHON_ERRORS) as error:
            raise TokenizerError(f"the chat template of {self._folder} cannot be compiled: {error!r}") from error

    @cached_property
    def _token_names(self) -> dict[str, str]:
        names = {role: special_tokens.read_token_name(self._folder, role) for role in _TOKEN_ROLES}
        return {role: name for role, name in names.items() if name is not None}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a chat. `messages` and `tools` are plain, checked values (see `chat_messages.py`).

        Raises:
            RequestError: the template refuses the messages, or they lack something it needs.
            TokenizerError: the template is at fault.
        """
        template = self._template
        variables = {**self._token_names, "messages": messages, "tools": tools}
        token = self._sandbox.num_steps.set(0)
        try:
            return self._collect(template, {**variables, "add_generation_prompt": add_generation_prompt})
        except _RefusedError as error:
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        except UndefinedError as error:
            raise RequestError(f"the messages lack what the chat template needs: {error}", param="messages") from error
        except (TemplateError, *_PYTHON_ERRORS) as error:
            raise TokenizerError(f"the chat template of {self._folder} failed: {error}") from error
        finally:
            self._sandbox.num_steps.reset(token)

    def _collect(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in template.generate(**variables):
            length += len(piece)
            _refuse_length(length)
            pieces.append(piece)
        return "".join(pieces)
