"""Bits per byte of the held-out text: the model, `xz -9` of the text itself, and an order-5 byte n-gram.

`python -m tools.builtin_model.evaluate` runs xz and the n-gram; `--model FOLDER` the model in that folder instead, by
`transformers`, or with `--engine DEVICE` by this project's engine (`--dtype`, `--backend`).
A document is scored from an [EOS] before it to the [EOS] that ends it, and divided by its UTF-8 bytes alone.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from transformers import KimiLinearForCausalLM

    from deltafold import Engine

SCRATCH = Path(".work/builtin")
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint64]


def xz_bits_per_byte(data: bytes) -> float:
    """What `xz -9` makes of the text on its own, its container included."""
    return 8 * len(lzma.compress(data, preset=9)) / len(data)


class ByteNgram:
    """Interpolated Witten-Bell over contexts of 0 to `order` bytes, above a uniform distribution. Normalised:

    p_n(c | h) = (count(h c) + types(h) p_{n-1}(c | h')) / (count(h) + types(h)), where h' drops the oldest byte of h.
    """

    def __init__(self, data: bytes, order: int = 5) -> None:
        self.order = order
        self.grams: list[
            tuple[Keys, Floats]
        ] = []  # per length: the n-grams seen (context and next byte) and their counts
        self.contexts: list[
            tuple[Keys, Floats, Floats]
        ] = []  # per length: contexts, their counts, their numbers of types
        for length in range(order + 1):
            grams, counts = np.unique(self._keys(data, length), return_counts=True)
            contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
            types = np.diff(np.append(first, len(grams))).astype(np.float64)
            self.grams.append((grams, counts.astype(np.float64)))
            self.contexts.append((contexts, np.add.reduceat(counts, first).astype(np.float64), types))

    @staticmethod
    def _keys(data: bytes, length: int) -> Keys:
        """The last length + 1 bytes at every position that has that many, packed into an integer."""
        text = np.frombuffer(data, dtype=np.uint8).astype(np.uint64)
        count = len(text) - length
        keys = np.zeros(max(count, 0), dtype=np.uint64)
        for offset in range(length + 1):
            keys = (keys << np.uint64(8)) | text[offset : offset + count]
        return keys

    @staticmethod
    def _find(table: Keys, keys: Keys) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
        return at, table[at] == keys

    def probabilities(self, data: bytes) -> Floats:
        """p(byte | the bytes of `data` before it) at every position; the first bytes have shorter contexts."""
        p = np.full(len(data), 1 / 256)
        for length in range(min(self.order, len(data) - 1) + 1):
            keys = self._keys(data, length)
            grams, gram_counts = self.grams[length]
            contexts, context_counts, types = self.contexts[length]
            at, seen = self._find(grams, keys)
            count = np.where(seen, gram_counts[at], 0.0)
            at, known = self._find(contexts, keys >> np.uint64(8))
            total, kinds = np.where(known, context_counts[at], 0.0), np.where(known, types[at], 1.0)
            p[length:] = (count + kinds * p[length:]) / (total + kinds)
        return p

    def bits_per_byte(self, data: bytes) -> float:
        return float(-np.log2(self.probabilities(data)).sum() / len(data))


@dataclass(frozen=True)
class TokenSet:
    """One split as token documents. ids [N] uint16, lengths [D] tokens, num_bytes [D], sources [D]."""

    ids: npt.NDArray[np.uint16]
    lengths: npt.NDArray[np.int32]
    num_bytes: npt.NDArray[np.int32]
    sources: npt.NDArray[np.str_]

    @classmethod
    def load(cls, path: Path) -> TokenSet:
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["lengths"], arrays["num_bytes"], arrays["sources"])

    def first(self, count: int) -> TokenSet:
        """The first `count` documents."""
        lengths = self.lengths[:count]
        return TokenSet(self.ids[: lengths.sum()], lengths, self.num_bytes[:count], self.sources[:count])

    def documents(self) -> list[npt.NDArray[np.uint16]]:
        return np.split(self.ids, np.cumsum(self.lengths)[:-1])


@dataclass(frozen=True)
class Score:
    bits: float
    num_bytes: int
    by_source: dict[str, float]  # bits per byte

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.num_bytes


def score_model(
    model: KimiLinearForCausalLM,
    tokens: TokenSet,
    eos_id: int,
    *,
    window: int = 2048,
    batch: int = 16,
    autocast: bool = False,
) -> Score:
    """Total bits of all documents. A document longer than `window` is read in windows that overlap by half; a token is
    scored in the first window that holds it."""
    import torch
    import torch.nn.functional as F

    device = next(model.parameters()).device
    stride = window // 2
    rows: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # input ids, targets (-100: not scored here), document
    for number, document in enumerate(tokens.documents()):
        sequence = torch.tensor([eos_id, *document.tolist(), eos_id])
        done = 0  # targets scored so far
        for start in range(0, len(sequence) - 1, stride):
            inputs, targets = sequence[start : start + window], sequence[start + 1 : start + window + 1].clone()
            inputs = inputs[: len(targets)]
            targets[: done - start] = -100
            rows.append((inputs, targets, number))
            done = start + len(targets)
            if done == len(sequence) - 1:
                break
    rows.sort(key=lambda row: len(row[0]))
    bits: dict[str, float] = defaultdict(float)
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        longest = -(-max(len(row[0]) for row in part) // 64) * 64  # few distinct lengths: kernels are tuned per length
        ids = torch.stack([F.pad(row[0], (0, longest - len(row[0])), value=eos_id) for row in part]).to(device)
        targets = torch.stack([F.pad(row[1], (0, longest - len(row[1])), value=-100) for row in part]).to(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden).float()
        losses = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            .view(targets.shape)
            .double()
            .sum(1)
        )
        for row, loss in zip(part, losses.tolist(), strict=True):
            bits[str(tokens.sources[row[2]])] += loss / math.log(2)
    return _score(bits, tokens)


def score_engine(engine: Engine, tokens: TokenSet, eos_id: int, *, window: int = 2048) -> Score:
    """What `score_model` computes, by an engine: the same windows, so that the two can be compared."""
    from deltafold import SamplingParams

    prompts: list[list[int]] = []
    scored: list[tuple[int, str]] = []  # how many tokens at a prompt's end are scored in it, and the source
    for document, source in zip(tokens.documents(), tokens.sources.tolist(), strict=True):
        sequence = [eos_id, *document.tolist(), eos_id]
        done = 1
        for start in range(0, len(sequence) - 1, window // 2):
            end = min(len(sequence), start + window + 1)
            prompts.append(sequence[start:end])
            scored.append((end - done, source))
            done = end
            if end == len(sequence):
                break
    bits: dict[str, float] = defaultdict(float)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for at in range(0, len(prompts), 64):  # logprobs are Python objects: a few hundred bytes a token
        completions = engine.complete_tokens(prompts[at : at + 64], params)
        for completion, (count, source) in zip(completions, scored[at : at + 64], strict=True):
            entries = (completion.prompt_logprobs or ())[-count:]
            bits[source] -= sum(entry.logprob for entry in entries if entry is not None) / math.log(2)
    return _score(bits, tokens)


def _score(bits: dict[str, float], tokens: TokenSet) -> Score:
    sizes: dict[str, int] = defaultdict(int)
    for source, size in zip(tokens.sources.tolist(), tokens.num_bytes.tolist(), strict=True):
        sizes[source] += size
    return Score(sum(bits.values()), sum(sizes.values()), {s: bits[s] / sizes[s] for s in sizes})


def _scored_by_engine(arguments: argparse.Namespace, tokens: TokenSet) -> Score:
    from deltafold import Engine

    from .tokenizer import SPECIAL_IDS

    with Engine.load(
        arguments.model,
        device=arguments.engine,
        dtype=arguments.dtype,
        backend=arguments.backend,
        memory=2**31,
        prefix_cache=False,
        show_progress=False,
    ) as engine:
        return score_engine(engine, tokens, SPECIAL_IDS["[EOS]"])


def _scored_by_transformers(arguments: argparse.Namespace, tokens: TokenSet) -> Score:
    import torch

    from .model import EOS_ID, load, use_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_kernels(device)
    return score_model(load(arguments.model, device), tokens, EOS_ID, batch=2 if device.type == "cpu" else 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of an exported model")
    parser.add_argument("--engine", choices=("cpu", "cuda"), help="score it by this project's engine on this device")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of --engine")
    parser.add_argument("--backend", default="portable", choices=("portable", "triton"), help="of --engine")
    parser.add_argument("--split", default="heldout", choices=("valid", "heldout"))
    parser.add_argument(
        "--max-documents", type=int, help="score only this many documents, evenly spread (the model is slow on a CPU)"
    )
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    if arguments.model:
        tokens = TokenSet.load(SCRATCH / "tokens" / f"{arguments.split}.npz")
        if arguments.max_documents and arguments.max_documents < len(tokens.lengths):
            documents = tokens.documents()
            chosen = np.linspace(0, len(documents) - 1, arguments.max_documents).astype(int)
            ids = np.concatenate([documents[i] for i in chosen])
            tokens = TokenSet(ids, tokens.lengths[chosen], tokens.num_bytes[chosen], tokens.sources[chosen])
        score = _scored_by_engine(arguments, tokens) if arguments.engine else _scored_by_transformers(arguments, tokens)
        result["model"] = {
            "bits_per_byte": score.bits_per_byte,
            "num_bytes": score.num_bytes,
            "by_source": score.by_source,
        }
    else:
        heldout = (SCRATCH / "data" / "heldout.txt").read_bytes()
        rows = (json.loads(line) for line in (SCRATCH / "data" / "train.jsonl").read_text("utf-8").splitlines())
        train = "\n".join(row["text"] for row in rows).encode()
        result["heldout_bytes"], result["train_bytes"] = len(heldout), len(train)
        result["xz_9"] = xz_bits_per_byte(heldout)
        for order in (4, 5):
            result[f"ngram_{order}_bytes_of_context"] = ByteNgram(train, order).bits_per_byte(heldout)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
