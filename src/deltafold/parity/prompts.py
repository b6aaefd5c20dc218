"""The file of prompts that `parity record` takes: text, one prompt a line, or a JSON list of texts and token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from deltafold import Engine, GoldenError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to complete. `text` is None where the file gave token ids."""

    text: str | None
    token_ids: tuple[int, ...]


def read_prompts(path: Path, engine: Engine) -> list[Prompt]:
    """The prompts of a file, encoded by the engine's tokenizer.

    A name that ends in `.json` holds a list whose items are strings or lists of token ids; any other file one prompt a
    line, blank lines skipped. GoldenError names the line or item that is wrong.
    """
    try:
        content = path.read_text(encoding="utf-8")
        items = (
            json.loads(content) if path.suffix == ".json" else [line for line in content.splitlines() if line.strip()]
        )
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise GoldenError(f"{path}: {error}") from error
    if not isinstance(items, list) or not items:
        raise GoldenError(f"{path}: there must be at least one prompt; JSON must be a list")
    return [_prompt(item, f"{path}: prompt {i}", engine) for i, item in enumerate(items)]


def _prompt(item: object, where: str, engine: Engine) -> Prompt:
    if isinstance(item, str):
        token_ids = tuple(engine.encode(item))
        if not token_ids:
            raise GoldenError(f"{where} is empty")
        return Prompt(item, token_ids)
    if not isinstance(item, list) or not item:
        raise GoldenError(f"{where} must be a text or a list of token ids, got {item!r:.80}")
    for token_id in item:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < engine.vocab_size:
            raise GoldenError(f"{where}: {token_id!r:.80} is not a token id below {engine.vocab_size}")
    return Prompt(None, tuple(item))
