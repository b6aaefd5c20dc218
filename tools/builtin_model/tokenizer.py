"""Trains the built-in model's vocabulary, writes it in Kimi's format, and turns the text files into token arrays.

`python -m tools.builtin_model.tokenizer` writes tiktoken.model, tokenizer_config.json, chat_template.jinja and
generation_config.json to src/deltafold/builtin, and {train,valid,heldout}.npz to .work/builtin/tokens.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .chat import Message
from .data import SCRATCH, SEED

BUILTIN = Path("src/deltafold/builtin")
NUM_RANKS = 3840
NUM_RESERVED = 256
MODEL_MAX_LENGTH = 8192

# The split pattern is part of the file format: a tiktoken.model means nothing without it.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPECIAL_OFFSETS = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|start_header_id|>": 6,
    "<|end_header_id|>": 7, "[EOT]": 9, "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13, "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15, "<|im_middle|>": 17, "[UNK]": 254, "[PAD]": 255,
}  # fmt: skip
SPECIAL_IDS = {name: NUM_RANKS + offset for name, offset in SPECIAL_OFFSETS.items()}
VOCAB_SIZE = NUM_RANKS + NUM_RESERVED

CHAT_TEMPLATE = """\
{#- A message: its role token, the role's name, <|im_middle|>, the text (a string or text parts), <|im_end|>. -#}
{%- macro text_of(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none and content is defined -%}
    {%- for part in content -%}
      {%- if part is string -%}{{ part }}
      {%- elif part['type'] == 'text' -%}{{ part['text'] }}
      {%- else -%}{{ raise_exception('only text parts are supported, got type ' ~ part['type']) }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
  {%- set role = message['role'] -%}
  {%- if role == 'user' -%}<|im_user|>{{ message.get('name') or 'user' }}
  {%- elif role == 'assistant' -%}<|im_assistant|>{{ message.get('name') or 'assistant' }}
  {%- elif role == 'system' -%}<|im_system|>{{ message.get('name') or 'system' }}
  {%- elif role == 'tool' -%}<|im_system|>{{ message.get('name') or 'tool' }}
  {%- else -%}{{ raise_exception('unknown role ' ~ role) }}
  {%- endif -%}
  <|im_middle|>{{ text_of(message.get('content')) }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

ROLE_TOKENS = {"system": "<|im_system|>", "user": "<|im_user|>", "assistant": "<|im_assistant|>"}


def byte_of_symbol() -> dict[str, int]:
    """The byte-level alphabet that `tokenizers` writes its tokens in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


def train_bpe(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_RANKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    symbols = byte_of_symbol()
    ranks = {bytes(symbols[c] for c in token): rank for token, rank in tokenizer.get_vocab().items()}
    if sorted(ranks.values()) != list(range(NUM_RANKS)):
        raise ValueError(f"expected ranks 0..{NUM_RANKS - 1}, got {len(ranks)} distinct tokens")
    if {token for token, rank in ranks.items() if rank < 256} != {bytes([b]) for b in range(256)}:
        raise ValueError("the first 256 ranks must be the single bytes")
    return ranks


def name_of(token_id: int) -> str:
    """The name of a special id; those that have none of their own are written as Kimi's wrapper writes them."""
    named = {value: name for name, value in SPECIAL_IDS.items()}
    return named.get(token_id, f"<|reserved_token_{token_id}|>")


def load_encoding(folder: Path = BUILTIN) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "deltafold-builtin",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=load_tiktoken_bpe(str(folder / "tiktoken.model")),
        special_tokens={name_of(token_id): token_id for token_id in range(NUM_RANKS, VOCAB_SIZE)},
    )


def verify(tokenizer: Tokenizer, encoding: tiktoken.Encoding, texts: list[str]) -> int:
    """Ids of both must agree on every text, and every byte must survive. Returns the number of ids compared."""
    compared = 0
    for text in texts:
        ids = encoding.encode_ordinary(text)
        if tokenizer.encode(text, add_special_tokens=False).ids != ids:
            raise ValueError(f"tiktoken and tokenizers disagree on {text[:80]!r}")
        if encoding.decode_bytes(ids) != text.encode():
            raise ValueError(f"not restored: {text[:80]!r}")
        compared += len(ids)
    for byte in range(256):
        if encoding.decode_bytes([encoding.encode_single_token(bytes([byte]))]) != bytes([byte]):
            raise ValueError(f"byte {byte} is not a token")
    return compared


def write_config_files(folder: Path) -> None:
    named = {
        str(token_id): {
            "content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for name, token_id in SPECIAL_IDS.items()
    }  # fmt: skip
    config = {
        "added_tokens_decoder": named,
        "additional_special_tokens": [n for n in SPECIAL_IDS if n.startswith("<|im_")],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    stops = [SPECIAL_IDS["[EOS]"], SPECIAL_IDS["<|im_end|>"]]
    generation = {"bos_token_id": SPECIAL_IDS["[BOS]"], "eos_token_id": stops, "pad_token_id": SPECIAL_IDS["[PAD]"]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def encode_conversation(encoding: tiktoken.Encoding, messages: list[Message]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids.append(SPECIAL_IDS[ROLE_TOKENS[message.role]])
        ids += encoding.encode_ordinary(message.role)
        ids.append(SPECIAL_IDS["<|im_middle|>"])
        ids += encoding.encode_ordinary(message.content)
        ids.append(SPECIAL_IDS["<|im_end|>"])
    return ids


def read_jsonl(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save_tokens(path: Path, documents: list[list[int]], num_bytes: list[int], sources: list[str]) -> None:
    """ids of all documents end to end (uint16), document lengths in tokens and UTF-8 bytes, and source names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        ids=np.array([token for document in documents for token in document], dtype=np.uint16),
        lengths=np.array([len(document) for document in documents], dtype=np.int32),
        num_bytes=np.array(num_bytes, dtype=np.int32),
        sources=np.array(sources),
    )


def main() -> None:
    data = SCRATCH / "data"
    texts = {
        name: [str(row["text"]) for row in read_jsonl(data / f"{name}.jsonl")] for name in ("train", "valid", "heldout")
    }
    sample = random.Random(SEED).sample(texts["train"], k=len(texts["train"]) // 2)
    tokenizer = train_bpe(iter(sample))
    BUILTIN.mkdir(parents=True, exist_ok=True)
    ranks = sorted(ranks_of(tokenizer).items(), key=lambda item: item[1])
    (BUILTIN / "tiktoken.model").write_text("".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks))
    write_config_files(BUILTIN)
    encoding = load_encoding()
    checked = texts["valid"] + sample[:300]
    odd = [
        "",
        " ",
        "\n\n \n",
        "I'LL don't WE'VE",
        "\u4f60\u597d world\u4e16\u754c",
        "caf\u00e9 \U0001f600 1234567",
        "a\tb \r\n c   d",
    ]
    print(f"tiktoken and tokenizers agree on {verify(tokenizer, encoding, checked + odd)} ids")

    for name in ("train", "valid", "heldout"):
        rows = read_jsonl(data / f"{name}.jsonl")
        documents = encoding.encode_ordinary_batch(texts[name], num_threads=2)
        sources = [str(row["source"]) for row in rows]
        num_bytes = [len(text.encode()) for text in texts[name]]
        if name == "train":
            for row in read_jsonl(data / "chat.jsonl"):
                messages = [Message(**m) for m in row["messages"]]  # type: ignore[attr-defined]
                documents.append(encode_conversation(encoding, messages))
                num_bytes.append(sum(len(m.content.encode()) for m in messages))
                sources.append("chat")
        save_tokens(SCRATCH / "tokens" / f"{name}.npz", documents, num_bytes, sources)
        tokens = sum(map(len, documents))
        print(f"{name}: {len(documents)} documents, {tokens} tokens, {sum(num_bytes) / tokens:.3f} bytes a token")


if __name__ == "__main__":
    main()
