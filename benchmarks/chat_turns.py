"""Time to first token of a chat's turns with and without the prefix cache, in one run: ratios, not absolute times.

One client, five turns; by the fifth the history has `--history` tokens. Every figure is the median of repeats that
alternate between the two engines; each repeat has a salt of its own, so that it begins cold. Prints a table and ends
in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from importlib.resources import files

import torch

from deltafold import ChatMessage, Engine, SamplingParams

NUM_TURNS = 5
ANSWER_TOKENS = 32
LAST_QUESTION = "Which of these passages did you like best, and why?"


@dataclass(frozen=True)
class Turn:
    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float  # from the call to the first token


def passages(engine: Engine, history: int) -> list[str]:
    """Four messages that, with their answers, make a history of about that many tokens."""
    words = (files("deltafold") / "builtin" / "heldout_sample.txt").read_text().split(" ")
    room = history // (NUM_TURNS - 1) - ANSWER_TOKENS - 10
    texts, start = [], 0
    for _ in range(NUM_TURNS - 1):
        stop = start
        while len(engine.encode(" ".join(words[start:stop]))) < room:
            stop += 5
        texts.append("Read this: " + " ".join(words[start:stop]))
        start = stop
    return texts


def ask(engine: Engine, messages: list[ChatMessage], salt: str) -> tuple[Turn, str]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, cache_salt=salt)
    token_ids = engine.chat_token_ids(messages)
    start = time.perf_counter()
    seconds, texts, usage = 0.0, [], None
    for output in engine.stream(token_ids, params):
        seconds = seconds or time.perf_counter() - start
        texts.append(output.text)
        usage = output.usage or usage
    assert usage is not None
    return Turn(usage.num_prompt_tokens, usage.num_cached_tokens, seconds), "".join(texts)


def converse(cached: Engine, plain: Engine, questions: list[str], salt: str) -> list[tuple[Turn, Turn]]:
    """The same conversation on both engines, turn by turn."""
    messages: list[ChatMessage] = []
    turns = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        with_cache, answer = ask(cached, messages, salt)
        without, same = ask(plain, messages, salt)
        assert same == answer, "the two engines answered differently"
        turns.append((with_cache, without))
        messages.append({"role": "assistant", "content": answer})
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--history", type=int, default=2000, help="tokens before the fifth turn")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    engines = [
        Engine.load(arguments.model, device=arguments.device, max_num_seqs=2, prefix_cache=prefix_cache)
        for prefix_cache in (True, False)
    ]
    questions = [*passages(engines[0], arguments.history), LAST_QUESTION]
    converse(engines[0], engines[1], questions, "warm-up")
    runs = [converse(engines[0], engines[1], questions, str(repeat)) for repeat in range(arguments.repeats)]
    rows = []
    for i in range(NUM_TURNS):
        cached = statistics.median(run[i][0].seconds for run in runs)
        plain = statistics.median(run[i][1].seconds for run in runs)
        first = runs[0][i][0]
        rows.append((i + 1, first.num_prompt_tokens, first.num_cached_tokens, cached, plain, plain / cached))
    print(f"{'turn':<6}{'prompt':>8}{'cached':>8}{'with, ms':>11}{'without, ms':>13}{'ratio':>8}")
    for turn, prompt, num_cached, cached, plain, ratio in rows:
        print(f"{turn:<6}{prompt:>8}{num_cached:>8}{cached * 1e3:>11.1f}{plain * 1e3:>13.1f}{ratio:>8.2f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    keys = ("turn", "num_prompt_tokens", "num_cached_tokens", "seconds_with", "seconds_without", "ratio")
    report = {
        "turns": [dict(zip(keys, row, strict=True)) for row in rows],
        "device": str(engines[0].describe()["device"]),
        "gpu": torch.cuda.get_device_name() if arguments.device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }
    for engine in engines:
        engine.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
