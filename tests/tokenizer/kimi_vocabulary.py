"""A small vocabulary in Kimi's format: ranks trained on the text below, Kimi's special table, a template."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_MERGES = 320
NUM_RANKS = 256 + NUM_MERGES
VOCAB_SIZE = NUM_RANKS + 256 + 8
"""Eight more rows than named and reserved ids, as an embedding padded to a round size has."""

SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "[UNK]": 254,
    "[PAD]": 255,
}
SPECIAL_IDS = {name: NUM_RANKS + offset for name, offset in SPECIAL_OFFSETS.items()}

TRAINING_TEXT = """
The river ran slowly through the old town, and the people who lived beside the river said that nobody had ever
seen it stop. They didn't ask where it came from; they'd known it all their lives, and it's said that what we've
always known we never question. In the winter of 1984 the water rose 12 feet in 3 days.
def running_total(values: list[int]) -> list[int]:
    total = 0
    results = []
    for value in values:
        total += value
        results.append(total)
    return results
<div class="note"><p>[see also: the index]</p></div>  {"key": [1, 2, 3], "other": null}
小河慢慢地流过古老的小镇。住在河边的人们说。从来没有人见过河水停下来。他们没有问河水从哪里来。
人们总是说。我们一直知道的事情。我们从来不问。一九八四年的冬天。河水在三天里涨了十二尺。
Река медленно текла через старый город, и люди возле реки говорили, что никто не видел, чтобы она остановилась.
😀 👍 ✨ — … “quoted” café naïve 日本語のテキスト 한국어
"""

CHAT_TEMPLATE = """
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and message.role != 'system' -%}
    <|im_system|>system<|im_middle|>You answer briefly.<|im_end|>
  {%- endif -%}
  {%- if message.role == 'tool' -%}
    <|im_system|>{{ message.name or 'tool' }}<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}
  {%- elif message.role == 'assistant' -%}
    <|im_assistant|>assistant<|im_middle|>{{ message.content }}
    {%- if message.tool_calls -%}
      <|tool_calls_section_begin|>
      {%- for call in message.tool_calls -%}
        <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
        {{- call.function.arguments | tojson }}<|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- else -%}
    <|im_{{ message.role }}|>{{ message.name or message.role }}<|im_middle|>{{ message.content }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def _merged(parts: Sequence[bytes], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    result: list[bytes] = []
    position = 0
    while position < len(parts):
        size = 2 if tuple(parts[position : position + 2]) == pair else 1
        result.append(b"".join(parts[position : position + size]))
        position += size
    return tuple(result)


def train_ranks() -> list[bytes]:
    """Byte-pair merges of the most frequent neighbours, over rough words and runs of space."""
    pieces = re.findall(r" ?\w+| ?[^\w\s]+|\s+", TRAINING_TEXT)
    words = Counter(tuple(bytes((byte,)) for byte in piece.encode()) for piece in pieces)
    words[(b" ",) * 16] = 5
    words[(b"a",) * 8] = 5
    # Byte order other than 0..255, so that nothing can take a byte for its rank.
    ranks = [bytes((byte ^ 0x55,)) for byte in range(256)]
    while len(ranks) < NUM_RANKS:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, count in words.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.append(b"".join(best))
        words = Counter({_merged(parts, best): count for parts, count in words.items()})
    return ranks


def ranks_file(tokens: Sequence[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def added_token(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **flags, "special": not content.startswith("<|tool_call")}


def tokenizer_config() -> dict[str, Any]:
    return {
        "added_tokens_decoder": {str(token_id): added_token(name) for name, token_id in SPECIAL_IDS.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
    }


def write_kimi_folder(folder: Path, tokens: Sequence[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_bytes(ranks_file(tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": SPECIAL_IDS["<|im_end|>"]}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
