"""CPU speed beside `transformers` on the same checkpoint and dtype, in one run: ratios, not absolute times.

Decode = difference of two output lengths over the same prompt; every figure is the median of repeats that alternate
between the two engines. Prints a table and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
import transformers
from transformers import AutoModelForCausalLM

from deltafold import Engine, SamplingParams

PROMPT = 64
SHORT, LONG = 8, 72
PREFILL = 2048


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Random ids, the same every run."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocab, (count, length), generator=generator).tolist()


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Ours:
    def __init__(self, model: str, dtype: str) -> None:
        self.engine = Engine.load(
            model, device="cpu", dtype=dtype, max_num_seqs=8, max_num_batched_tokens=PREFILL, prefix_cache=False
        )

    def generate(self, ids: list[list[int]], count: int) -> None:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        for completion in self.engine.complete_tokens(ids, params):
            assert len(completion.token_ids) == count


class Theirs:
    def __init__(self, folder: str, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(self, ids: list[list[int]], count: int) -> None:
        out = self.model.generate(
            torch.tensor(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        assert out.shape[1] == len(ids[0]) + count


def decode_rate(engine: Ours | Theirs, ids: list[list[int]]) -> float:
    """Tokens a second of all sequences together."""
    spent = seconds(lambda: engine.generate(ids, LONG)) - seconds(lambda: engine.generate(ids, SHORT))
    return len(ids) * (LONG - SHORT) / spent


def prefill_rate(engine: Ours | Theirs, ids: list[list[int]]) -> float:
    """Prompt tokens a second (the first output token included)."""
    return PREFILL / seconds(lambda: engine.generate(ids, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--folder", help="the same checkpoint as a folder, for transformers (default: the built-in)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    ours = Ours(arguments.model, arguments.dtype)
    folder = arguments.folder or (arguments.model if arguments.model != "builtin" else _builtin_folder())
    theirs = Theirs(folder, arguments.dtype)
    vocab = ours.engine.vocab_size
    one, eight, long = prompts(1, PROMPT, vocab), prompts(8, PROMPT, vocab), prompts(1, PREFILL, vocab)
    cases: dict[str, Callable[[Ours | Theirs], float]] = {
        "decode_b1": lambda engine: decode_rate(engine, one),
        "decode_b8": lambda engine: decode_rate(engine, eight),
        "prefill_2048": lambda engine: prefill_rate(engine, long),
    }
    result: dict[str, dict[str, float]] = {}
    for name, measure in cases.items():
        for engine in (ours, theirs):
            measure(engine)  # warm-up
        rates = [(measure(ours), measure(theirs)) for _ in range(arguments.repeats)]
        mine, other = (statistics.median(column) for column in zip(*rates, strict=True))
        result[name] = {"deltafold": mine, "transformers": other, "ratio": mine / other}
    eight_over_their_one = result["decode_b8"]["deltafold"] / result["decode_b1"]["transformers"]
    eight_over_our_one = result["decode_b8"]["deltafold"] / result["decode_b1"]["deltafold"]
    ours.engine.close()
    print(f"{'case':<14}{'deltafold':>12}{'transformers':>14}{'ratio':>8}   tokens/s, {arguments.dtype}")
    for name, row in result.items():
        print(f"{name:<14}{row['deltafold']:>12.1f}{row['transformers']:>14.1f}{row['ratio']:>8.2f}")
    print(
        f"deltafold's batch 8 over transformers' batch 1: {eight_over_their_one:.2f}; "
        f"over its own: {eight_over_our_one:.2f}"
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                **result,
                "b8_over_their_b1": eight_over_their_one,
                "b8_over_our_b1": eight_over_our_one,
                "dtype": arguments.dtype,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "commit": commit.stdout.strip(),
            }
        )
    )


def _builtin_folder() -> str:
    from importlib.resources import files

    return str(files("deltafold") / "builtin")


if __name__ == "__main__":
    main()
