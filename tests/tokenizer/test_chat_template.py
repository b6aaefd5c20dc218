"""Chats: rendering, control tokens from the template alone, checks on messages, the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.kimi_vocabulary import CHAT_TEMPLATE, SPECIAL_IDS, VOCAB_SIZE
from transformers.utils.chat_template_utils import render_jinja_template

from deltafold.errors import RequestError, TokenizerError, UnsupportedOptionError
from deltafold.tokenizer import chat_template as chat_module
from deltafold.tokenizer.tokenizer import Tokenizer

CONTROL_IDS = frozenset(SPECIAL_IDS.values())
USER = [{"role": "user", "content": "Where does the river go?"}]
TOOLS = [{"type": "function", "function": {"name": "depth", "parameters": {"z": 1, "a": ["<x>", None, 1.5]}}}]
CONVERSATION = [
    {"role": "system", "content": "You know rivers."},
    {
        "role": "user",
        "name": "Ann",
        "content": [{"type": "text", "text": "How deep "}, {"type": "text", "text": "is it?"}],
    },
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "depth:0", "type": "function", "function": {"name": "depth", "arguments": {"at": "town"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "depth:0", "content": " 12 <feet>\n"},
]


def _control_tokens(token_ids: list[int]) -> list[int]:
    return [token_id for token_id in token_ids if token_id in CONTROL_IDS]


def test_a_chat_is_its_control_tokens_and_texts(tokenizer: Tokenizer) -> None:
    expected: list[int] = []
    for mark, name, text in (
        ("<|im_system|>", "system", "You answer briefly."),
        ("<|im_user|>", "user", USER[0]["content"]),
    ):
        expected += [SPECIAL_IDS[mark], *tokenizer.encode(name), SPECIAL_IDS["<|im_middle|>"]]
        expected += [*tokenizer.encode(text), SPECIAL_IDS["<|im_end|>"]]
    assert tokenizer.encode_chat(USER, add_generation_prompt=False) == expected
    expected += [SPECIAL_IDS["<|im_assistant|>"], *tokenizer.encode("assistant"), SPECIAL_IDS["<|im_middle|>"]]
    assert tokenizer.encode_chat(USER) == expected


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> None:
    flat = [dict(message) for message in CONVERSATION]
    flat[1]["content"] = "How deep is it?"
    flat[2]["content"] = ""
    rendered = tokenizer.render_chat(CONVERSATION, tools=tools)
    # Kimi's wrapper sorts the keys of tools; a folder without tiktoken.model has no such habit.
    shown = json.loads(json.dumps(tools, sort_keys=tokenizer._vocabulary.is_kimi))
    expected, _ = render_jinja_template([flat], tools=shown, chat_template=CHAT_TEMPLATE, add_generation_prompt=True)
    assert rendered == expected[0]
    assert tokenizer.decode(tokenizer.encode_chat(CONVERSATION, tools=tools), skip_special_tokens=False) == rendered


PIECES = [*SPECIAL_IDS, "<|im_", "end|>", "[", "EOS", "]", "<", "|>", " ", "\n", "im_end", "user", "7", "text", "中"]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(HOSTILE, min_size=3, max_size=3), parts=st.lists(HOSTILE, min_size=2, max_size=2))
def test_no_user_text_becomes_a_control_token(kimi: Tokenizer, texts: list[str], parts: list[str]) -> None:
    def chat(name: str, one: str, two: str, three: str) -> list[dict[str, Any]]:
        return [
            {"role": "user", "name": name, "content": [{"type": "text", "text": one}, {"type": "text", "text": two}]},
            {"role": "tool", "tool_call_id": three, "content": one},
            {
                "role": "assistant",
                "content": two,
                "tool_calls": [{"id": three, "function": {"arguments": {one: [two]}}}],
            },
        ]

    hostile = chat(texts[0] + ".", parts[0], parts[1], texts[1])
    tools = [{"name": texts[2], texts[0]: {"x": texts[1]}}]
    token_ids = kimi.encode_chat(hostile, tools=tools)
    tame = kimi.encode_chat(chat("n", "x", "y", "z"), tools=[{"name": "t"}])
    assert _control_tokens(token_ids) == _control_tokens(tame)
    assert kimi.decode(token_ids, skip_special_tokens=False) == kimi.render_chat(hostile, tools=tools)


def _with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("<|im_{{ messages[0].content }}|>", "end"),
        ("[{{ messages[0].content | trim }}]", " EOS "),
        ("<|im_{{ messages[0].content }}", "end|> and more"),
        ("{{ messages[0].content }}|im_end|>", "<"),
        ("{{ messages[0].content | replace('X', '') }}", "<|imX_end|>"),
        ("{{ messages[0].content.split('X') | join }}", "[EXOS]"),
        ("{{ messages[0].content | lower }}", "<|IM_END|>"),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", "é<|im_end|>[EOS]"),
        ("<|im_{{ messages[0].content | tojson(ensure_ascii=true) }}|>", "[EOS]end"),
        ("{{ messages[0].content[:3] }}", "<|im_end|>"),
    ],
)
def test_templates_that_would_help_a_user_forge_a_token(kimi_copy: Path, template: str, content: str) -> None:
    tokenizer = _with_template(kimi_copy, template)
    message = [{"role": "user", "content": content}]
    token_ids = tokenizer.encode_chat(message)
    assert not _control_tokens(token_ids)
    plain, _ = render_jinja_template([message], chat_template=template)
    assert tokenizer.decode(token_ids) == plain[0]
    assert plain[0] == "<|i" or any(name in plain[0] for name in SPECIAL_IDS)


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], RequestError, "messages is empty"),
        ("hello", RequestError, "messages must be a list of messages, got 'hello'"),
        (["hello"], RequestError, r"messages\[0\] must be an object with role and content, got 'hello'"),
        ([{"role": "robot", "content": "x"}], RequestError, r"messages\[0\]\.role must be one of .* got 'robot'"),
        ([{"content": "x"}], RequestError, r"messages\[0\]\.role must be one of .* got None"),
        (
            [{"role": "user"}],
            RequestError,
            r"messages\[0\]\.content must be a string or a list of text parts, got None",
        ),
        ([{"role": "user", "content": 3}], RequestError, r"content must be a string or a list of text parts, got 3"),
        ([{"role": "user", "content": ["x"]}], RequestError, r"content\[0\] must be an object with a type, got 'x'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            UnsupportedOptionError,
            r"content\[0\] has type 'image_url', only 'text'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}],
            UnsupportedOptionError,
            r"content\[0\] has unknown fields \['cache'\]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], RequestError, r"content\[0\]\.text must be a string"),
        ([{"role": "user", "content": "x", "weight": 1}], UnsupportedOptionError, r"unknown fields \['weight'\]"),
        ([{"role": "user", "content": "\ud800"}], RequestError, r"lone surrogate U\+D800 at character 0"),
        ([{"role": "assistant", "tool_calls": {"id": 1}}], RequestError, "tool_calls must be a list of objects"),
        (
            [{"role": "assistant", "tool_calls": [{"id": b"x"}]}],
            RequestError,
            r"tool_calls\[0\]\.id must be a JSON value",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": float("nan")}]}], RequestError, "must be a JSON value, got nan"),
        ([{"role": "assistant", "tool_calls": [{1: "x"}]}], RequestError, "a key of .* must be a string, got 1"),
    ],
)
def test_bad_messages_are_refused_by_name(kimi: Tokenizer, messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kimi.encode_chat(messages)


def test_bad_tools_are_refused_by_name(kimi: Tokenizer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"x": deep}
    for tools, message in (
        ("t", "tools must be a list"),
        ([1], r"tools\[0\] must be an object"),
        ([deep], "deeper than 32"),
    ):
        with pytest.raises(RequestError, match=message):
            kimi.encode_chat(USER, tools=tools)  # type: ignore[arg-type]
    assert kimi.encode_chat(USER, tools=[]) == kimi.encode_chat(USER)


def test_templates_come_from_the_file_or_the_config(kimi_copy: Path) -> None:
    (kimi_copy / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_folder(kimi_copy, vocab_size=VOCAB_SIZE)
    with pytest.raises(TokenizerError, match=r"model has no chat template"):
        tokenizer.encode_chat(USER)
    config = json.loads((kimi_copy / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}named"}]
    for value, expected in (("{{ eos_token }}text", "[EOS]text"), (named, "[BOS]named")):
        (kimi_copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        assert Tokenizer.from_folder(kimi_copy, vocab_size=VOCAB_SIZE).render_chat(USER) == expected
    for bad, message in (
        ([{"name": "x", "template": "y"}], "no template named 'default', only"),
        (3, "must be a string"),
    ):
        (kimi_copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": bad}))
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_folder(kimi_copy, vocab_size=VOCAB_SIZE).render_chat(USER)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", RequestError, "refuses the messages: roles must alternate"),
        ("{{ messages[0].missing.deeper }}", RequestError, "messages lack what the chat template needs"),
        ("{% for %}", TokenizerError, "is malformed, line 1"),
        ("{{ 1 / 0 }}", TokenizerError, "failed: division by zero"),
        ("{{ messages | nofilter }}", TokenizerError, "is malformed, line 1: No filter named"),
        ("{% include 'other' %}", TokenizerError, "failed: no loader"),
        ("{{ messages.__class__.__mro__ }}", TokenizerError, "failed: access to attribute '__class__'"),
        ("{{ messages['__class__'].x }}", TokenizerError, "failed: access to attribute '__class__'"),
        ("{{ (''|attr('__class__')).x }}", TokenizerError, "failed: access to attribute '__class__'"),
        ("{{ raise_exception.__globals__.x }}", TokenizerError, "failed: access to attribute '__globals__'"),
        ("{{ cycler.__init__.__globals__ }}", TokenizerError, "failed: access to attribute '__init__'"),
        ("{% set _ = messages.append(1) %}", TokenizerError, "is not safely callable|unsafe"),
        ("{{ messages[0].update(role='x') }}", TokenizerError, "is not safely callable|unsafe"),
    ],
)
def test_template_faults_are_typed(kimi_copy: Path, template: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _with_template(kimi_copy, template).encode_chat(USER)


def test_forbidden_attributes_show_nothing(kimi_copy: Path) -> None:
    template = "({{ '{0.__class__}'.format(1) }}{{ raise_exception.__globals__ }}{{ messages['__class__'] }})"
    assert _with_template(kimi_copy, template).render_chat(USER) == "()"


RUNAWAYS = [
    ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "more than 5000 loop steps"),
    (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "more than 5000 loop",
    ),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: "),
    ("{{ 'x' * 10**12 }}", r"operator \*\* is not available"),
    ("{{ 'x' * 1000000000000 }}", "a value of 1000000000000 characters"),
    ("{{ 1000000000000 * [1] }}", "a value of 1000000000000 characters"),
    ("{{ 'x'.ljust(1000000000000) }}", "a value of 1000000000000 characters"),
    ("{{ '%1000000000000d' % 1 }}", "width of more than four digits"),
    ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "a value of"),
    ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "a value of"),
    ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "a value of 1600"),
    ("{{ range(10000000) }}", "failed: Range too big"),
]


@pytest.mark.parametrize(("template", "message"), RUNAWAYS, ids=range(len(RUNAWAYS)))
def test_a_template_cannot_run_away(
    kimi_copy: Path, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    if "loop" in message:
        monkeypatch.setattr(chat_module, "MAX_TEMPLATE_STEPS", 5000)
    with pytest.raises(TokenizerError, match=message):
        _with_template(kimi_copy, template).encode_chat(USER)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(6) %}{{ i }}{% endfor %}",
        "{% macro f(i) %}{{ i }}{% endmacro %}{{ f(0) }}{{ f(1) }}{{ f(2) }}{{ f(3) }}{{ f(4) }}{{ f(5) }}",
    ],
)
def test_steps_are_counted_per_rendering(kimi_copy: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    tokenizer = _with_template(kimi_copy, template)
    monkeypatch.setattr(chat_module, "MAX_TEMPLATE_STEPS", 6)
    assert [tokenizer.render_chat(USER) for _ in range(3)] == ["012345"] * 3
    monkeypatch.setattr(chat_module, "MAX_TEMPLATE_STEPS", 5)
    with pytest.raises(TokenizerError, match="more than 5 loop steps"):
        tokenizer.render_chat(USER)


@pytest.fixture
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now() -> Any:
            return chat_module.datetime.date(2026, 1, 2)

    class Module:
        datetime = Clock
        date = chat_module.datetime.date

    monkeypatch.setattr(chat_module, "datetime", Module)


@pytest.mark.usefixtures("fixed_clock")
def test_what_templates_may_use(kimi_copy: Path) -> None:
    template = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}\n"
        "  {% if true %}\n"
        "{{ {'b': '<é>', 'a': 1} | tojson }}|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}\n"
        "  {% endif %}\n"
        "{{ strftime_now('%d %b %Y') }}|{{ 'a' ~ 1 ~ none }}|{{ 'é' | tojson(ensure_ascii=true) }}|{{ [1] + [2] }}"
    )
    expected = '02{"b": "<é>", "a": 1}|{\n "a": 2,\n "b": 1\n}\n02 Jan 2026|a1None|"\\u00e9"|[1, 2]'
    assert _with_template(kimi_copy, template).render_chat(USER) == expected
