"""Collects the sources, holds out contiguous parts, guards against near duplicates, and writes the text files.

`python -m tools.builtin_model.data` writes to .work/builtin/data: train.jsonl, valid.jsonl (chooses the checkpoint),
heldout.jsonl (scored once), heldout.txt (the bytes that xz sees), chat.jsonl, and manifest.json (what went where).
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from .chat import conversations
from .sources import SOURCES, Document, fetch

SCRATCH = Path(".work/builtin")
SAMPLE = Path("src/deltafold/builtin/heldout_sample.txt")
SEED = 20261130
HELDOUT_SHARE, VALID_SHARE = 0.03, 0.01
BLOCK_BYTES = 24_000  # neighbouring documents are held out together
SHINGLE_WORDS = 13  # a training paragraph that shares this many words in a row with held-out text is dropped

Splits = dict[str, list[Document]]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def shingles(text: str) -> set[int]:
    words = words_of(text)
    return {hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(len(words) - SHINGLE_WORDS + 1)}


def blocks_of(documents: list[Document]) -> list[list[Document]]:
    blocks: list[list[Document]] = [[]]
    size = 0
    for document in documents:
        if size > BLOCK_BYTES:
            blocks.append([])
            size = 0
        blocks[-1].append(document)
        size += len(document.text.encode())
    return blocks


def split(documents: dict[str, list[Document]], seed: int) -> Splits:
    """Per source, whole blocks drawn by the seed until each share is full. Both Bibles hold out the same chapters."""
    rng = random.Random(seed)
    splits: Splits = {"train": [], "valid": [], "heldout": []}
    bible: dict[str, str] = {}
    for source, texts in documents.items():
        blocks = blocks_of(texts)
        order = list(range(len(blocks)))
        rng.shuffle(order)
        total = sum(len(d.text.encode()) for d in texts)
        filled = {"heldout": 0, "valid": 0}
        where = ["train"] * len(blocks)
        if source != "web" and len(blocks) > 4:  # dhammapada and the US papers are too small to part with anything
            for name, share in (("heldout", HELDOUT_SHARE), ("valid", VALID_SHARE)):
                while filled[name] < share * total:
                    index = order.pop()
                    where[index] = name
                    filled[name] += sum(len(d.text.encode()) for d in blocks[index])
        for name, block in zip(where, blocks, strict=True):
            for document in block:
                if source == "kjv":
                    bible[document.unit] = name
                splits[bible.get(document.unit, "train") if source == "web" else name].append(document)
    return splits


def drop_near_duplicates(splits: Splits) -> dict[str, int]:
    """Remove from training each paragraph that shares a shingle with the other splits; bytes dropped per source."""
    known: set[int] = set()
    for document in splits["heldout"] + splits["valid"]:
        known |= shingles(document.text)
    dropped: dict[str, int] = defaultdict(int)
    kept: list[Document] = []
    for document in splits["train"]:
        pieces = re.split(r"(\n+)", document.text)
        clean = "".join(
            piece + gap
            for piece, gap in zip(pieces[::2], [*pieces[1::2], ""], strict=True)
            if not piece or known.isdisjoint(shingles(piece))
        ).strip()
        dropped[document.source] += len(document.text.encode()) - len(clean.encode())
        entries = tuple(entry for entry in document.entries if known.isdisjoint(shingles(entry[1])))
        if clean:
            kept.append(Document(document.source, document.unit, clean, entries))
    splits["train"] = kept
    return dict(dropped)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def heldout_sample(documents: list[Document], size: int = 64_000) -> str:
    """About `size` bytes of whole held-out documents, public-domain sources in turn, two newlines after each."""
    queues = [
        [d for d in documents if d.source == name] for name in ("kjv", "austen", "tdavid", "jargon", "mhcc", "web")
    ]
    text = ""
    while any(queues):
        for queue in queues:
            if queue and len(text.encode()) + len(queue[0].text.encode()) <= size:
                text += queue.pop(0).text + "\n\n"
            elif queue:
                queue.pop(0)
    return text


def main() -> None:
    root = fetch(SCRATCH)
    documents = {source.name: list(source.load(root)) for source in SOURCES}
    splits = split(documents, SEED)
    dropped = drop_near_duplicates(splits)
    talks = conversations(splits["train"], SEED)
    out = SCRATCH / "data"
    out.mkdir(parents=True, exist_ok=True)
    SAMPLE.parent.mkdir(parents=True, exist_ok=True)
    for name, texts in splits.items():
        write_jsonl(out / f"{name}.jsonl", [{"source": d.source, "unit": d.unit, "text": d.text} for d in texts])
    write_jsonl(out / "chat.jsonl", [{"messages": [asdict(message) for message in talk]} for talk in talks])
    (out / "heldout.txt").write_text("".join(d.text + "\n" for d in splits["heldout"]), encoding="utf-8")
    SAMPLE.write_text(heldout_sample(splits["heldout"]), encoding="utf-8")
    sizes = {
        name: {s.name: sum(len(d.text.encode()) for d in texts if d.source == s.name) for s in SOURCES}
        for name, texts in splits.items()
    }
    manifest = {
        "seed": SEED,
        "sources": [{k: getattr(s, k) for k in ("name", "package", "version", "licence", "what")} for s in SOURCES],
        "bytes": sizes,
        "dropped_bytes": dropped,
        "chat": {"conversations": len(talks), "bytes": sum(len(m.content.encode()) for talk in talks for m in talk)},
        "totals": {name: sum(size.values()) for name, size in sizes.items()},
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(json.dumps({k: manifest[k] for k in ("totals", "chat", "dropped_bytes", "bytes")}, indent=1))


if __name__ == "__main__":
    main()
