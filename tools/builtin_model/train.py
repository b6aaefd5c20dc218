"""Trains the built-in model and writes it in the hub's layout, with its score and samples: one command, no network.

`python -m tools.builtin_model.train --out FOLDER` reads .work/builtin/tokens/*.npz (tokenizer.py). The schedule follows
the clock (`--max-minutes`) or the passes over the data (`--max-epochs`), whichever ends first. The checkpoint is chosen
on the validation part; the held-out part is scored once, at the end, with the exported bfloat16 weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import KimiLinearForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

from .evaluate import SCRATCH, TokenSet, score_model
from .model import EOS_ID, build, export, hub_config, load, use_kernels
from .optim import make_optimizers

STARTED = time.monotonic()
SAMPLE_PROMPTS = (
    "In the beginning", "And it came to pass", "The LORD is my shepherd;", "It is a truth universally acknowledged,",
    "hacker: n.", "The SELECT statement", "Python is a", "kindness (noun):", "Emma was", "Verse 1. ",
)  # fmt: skip
SAMPLE_QUESTIONS = ("What is a kluge?", "Quote Genesis 1:1.", "Who are you?", "What does charity mean?", "Hello")


def repeats(tokens: TokenSet, source_weights: dict[str, float]) -> npt.NDArray[np.float64]:
    """How often a pass reads each document, on average: its source's weight, 1 where none is given."""
    unknown = source_weights.keys() - set(tokens.sources.tolist())
    if unknown:
        raise SystemExit(f"--source-weights names sources there are none of: {', '.join(sorted(unknown))}")
    return np.array([source_weights.get(source, 1.0) for source in tokens.sources.tolist()])


def batches(
    tokens: TokenSet, weights: npt.NDArray[np.float64], batch: int, length: int, seed: int, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """(epoch, ids [batch, length + 1]) without end. Each pass joins the documents in a new order, an [EOS] after each,
    and cuts the stream into windows from a new offset. A document of weight 2.3 is read twice, or by chance three
    times."""
    rng = np.random.default_rng(seed)
    documents = [np.append(document, np.uint16(EOS_ID)) for document in tokens.documents()]
    epoch = 0
    while True:
        chosen = np.repeat(np.arange(len(documents)), np.floor(weights + rng.random(len(weights))).astype(np.int64))
        stream = np.concatenate([documents[i] for i in rng.permutation(chosen)])
        stream = np.roll(stream, int(rng.integers(length)))
        count = (len(stream) - 1) // length
        ids = torch.from_numpy(stream.astype(np.int64)).to(device)
        order = torch.from_numpy(rng.permutation(count)).to(device)
        reach = torch.arange(length + 1, device=device)
        for at in range(0, count - batch + 1, batch):
            yield epoch, ids[order[at : at + batch, None] * length + reach]
        epoch += 1


class LoadBalancer:
    """Loss-free balancing (arXiv 2408.15664): each step moves a choice bias by `rate` against the load error."""

    def __init__(self, model: KimiLinearForCausalLM, rate: float) -> None:
        self.rate = rate
        self.routers = [module for module in model.modules() if isinstance(module, KimiLinearTopkRouter)]
        self.counts = [torch.zeros_like(router.e_score_correction_bias) for router in self.routers]
        self.average = [torch.full_like(count, 1 / len(count)) for count in self.counts]
        for number, router in enumerate(self.routers):
            router.register_forward_hook(lambda module, _, output, number=number: self._count(module, output, number))

    def _count(self, router: Any, output: Any, number: int) -> None:
        if router.training:
            experts = torch.arange(router.num_experts, device=output[2].device)
            self.counts[number] += (output[2].unsqueeze(-1) == experts).sum((0, 1))

    def step(self, rate_scale: float) -> None:
        for router, count, average in zip(self.routers, self.counts, self.average, strict=True):
            share = count / count.sum().clamp_min(1)
            router.e_score_correction_bias += self.rate * rate_scale * torch.sign(share.mean() - share)
            average.lerp_(share, 0.02)
            count.zero_()

    def report(self) -> list[list[float]]:
        """Recent share of the chosen slots per layer and expert, in units of the even share (1.0 is balanced)."""
        return [[round(x * len(average), 3) for x in average.tolist()] for average in self.average]


def rate_at(progress: float, warmup: float, floor: float = 0.02) -> float:
    """Learning-rate factor: linear warm-up, then cosine down to `floor` at progress 1."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def greedy(model: KimiLinearForCausalLM, ids: list[int], count: int, stops: set[int]) -> list[int]:
    """Plain greedy decoding without a cache; the input is padded on the right to few distinct lengths."""
    made: list[int] = []
    device = next(model.parameters()).device
    for _ in range(count):
        sequence = ids + made
        padded = sequence + [EOS_ID] * (-len(sequence) % 128)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.model(input_ids=torch.tensor([padded], device=device), use_cache=False).last_hidden_state
            token = int(model.lm_head(hidden[0, len(sequence) - 1]).argmax())
        if token in stops:
            break
        made.append(token)
    return made


def write_samples(model: KimiLinearForCausalLM, path: Path, count: int) -> None:
    from .chat import Message
    from .tokenizer import SPECIAL_IDS, encode_conversation, load_encoding

    encoding = load_encoding()
    stops = {EOS_ID, SPECIAL_IDS["<|im_end|>"]}
    lines = []
    for prompt in SAMPLE_PROMPTS:
        made = greedy(model, encoding.encode_ordinary(prompt), count, stops)
        lines.append(f"--- {prompt!r}\n{prompt}{encoding.decode(made)}\n")
    for question in SAMPLE_QUESTIONS:
        ids = encode_conversation(encoding, [Message("user", question)])
        ids += [SPECIAL_IDS["<|im_assistant|>"], *encoding.encode_ordinary("assistant"), SPECIAL_IDS["<|im_middle|>"]]
        made = greedy(model, ids, count, stops)
        lines.append(f"--- chat {question!r} (ended: {len(made) < count})\n{encoding.decode(made)}\n")
    path.write_text("\n".join(lines), encoding="utf-8")


def train(arguments: argparse.Namespace, device: torch.device) -> tuple[KimiLinearForCausalLM, dict[str, Any]]:
    """Returns the model with the weights that did best on the validation part, and a report."""
    tokens, valid = (TokenSet.load(SCRATCH / "tokens" / f"{name}.npz") for name in ("train", "valid"))
    if arguments.tiny:
        valid = valid.first(2)
    torch.manual_seed(arguments.seed)
    model = load(arguments.init, device).train() if arguments.init else build(hub_config(arguments.tiny), device)
    weights = repeats(tokens, arguments.source_weights)
    model.config._experts_implementation = "builtin"
    optimizers = make_optimizers(model, arguments.lr, arguments.weight_decay)
    balancer = LoadBalancer(model, rate=0.002)
    total_tokens = arguments.max_epochs * float((weights * (tokens.lengths + 1)).sum())
    per_step = arguments.batch * arguments.length
    autocast = device.type == "cuda"

    best, best_bits, history = {}, math.inf, []
    # The first step compiles and tunes kernels, for up to minutes: the clock of the schedule starts after it.
    began = printed = time.monotonic()
    minutes = float(arguments.max_minutes)
    next_eval, running, seen = 0.25, torch.zeros((), device=device), 0
    # A second stage shifts the mixture on purpose: its last weights count, not those best on the first mixture.
    if arguments.init:
        next_eval = 1.0
    stream = batches(tokens, weights, arguments.batch, arguments.length, arguments.seed, device)
    for step, (epoch, ids) in enumerate(stream):
        now = time.monotonic()
        if step == 3:
            began = now
            minutes = min(arguments.max_minutes, arguments.deadline_minutes - (now - STARTED) / 60)
            print(f"first steps, kernels compiled: {now - printed:.1f} s; {minutes:.2f} minutes to train", flush=True)
        elapsed = (now - began) / 60 if step >= 3 else 0.0
        progress = max(elapsed / minutes, step * per_step / total_tokens)
        if arguments.max_steps:
            progress = step / arguments.max_steps
        if progress >= next_eval or progress >= 1:
            model.eval()
            score = score_model(model, valid, EOS_ID, window=arguments.length, batch=16, autocast=autocast)
            model.train()
            history.append(
                {"step": step, "progress": round(progress, 4), "valid_bits_per_byte": round(score.bits_per_byte, 4)}
            )
            print(
                f"  valid bits per byte {score.bits_per_byte:.4f} at step {step}, epoch {epoch}, {elapsed:.2f} min",
                flush=True,
            )
            if score.bits_per_byte < best_bits:
                best_bits, best = score.bits_per_byte, copy.deepcopy(model.state_dict())
            next_eval = progress + (0.04 if progress > 0.75 else 0.125)
            if progress >= 1:
                break
        factor = rate_at(progress, warmup=0.03)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.setdefault("peak", group["lr"])
                group["lr"] = group["peak"] * factor
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        balancer.step(min(1.0, 2 * factor))
        running += loss.detach()
        seen += 1
        if step < 3 or now - printed > 10:
            mean = running.item() / seen
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss became {mean} at step {step}")
            speed = seen * per_step / max(time.monotonic() - printed, 1e-9) if step > 3 else 0.0
            print(
                f"step {step} epoch {epoch} progress {progress:.3f} loss {mean:.4f} lr x{factor:.3f} "
                f"{speed / 1e3:.0f}k tokens/s",
                flush=True,
            )
            printed = time.monotonic() if step != 2 else printed
            running.zero_()
            seen = 0
    model.load_state_dict(best)
    model.eval()
    report = {
        "steps": step, "epochs": round(step * per_step / (len(tokens.ids) + len(tokens.lengths)), 2),
        "tokens": step * per_step, "minutes": round(elapsed, 2), "valid_bits_per_byte": best_bits,
        "history": history, "expert_load": balancer.report(),
        "arguments": {key: value for key, value in vars(arguments).items() if key != "out"},
        "torch": torch.__version__,
    }  # fmt: skip
    print(f"expert load, 1.0 is even: {balancer.report()}", flush=True)
    return model, report


def _source_weights(text: str) -> dict[str, float]:
    return {name: float(weight) for name, _, weight in (item.partition("=") for item in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-minutes", type=float, default=6.0)
    parser.add_argument(
        "--deadline-minutes", type=float, default=8.2, help="training ends by then, from the start of the process"
    )
    parser.add_argument("--max-epochs", type=float, default=12.0)
    parser.add_argument("--max-steps", type=int, default=0, help="end after so many steps instead (dry runs)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--init", type=Path, help="go on from this exported model instead of from random weights")
    parser.add_argument(
        "--source-weights", type=_source_weights, default={}, help="e.g. kjv=5,python=0.4: passes over a source's text"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same architecture in small, for a dry run on a CPU")
    parser.add_argument(
        "--split-mib", type=int, default=0, help="also cut model.safetensors into parts of so many MiB and remove it"
    )
    parser.add_argument("--no-score", action="store_true", help="leave scoring to evaluate.py, and write no samples")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("high")
    use_kernels(device)
    model, report = train(arguments, device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = hub_config(arguments.tiny)
    report["file_bytes"] = export(model, config, arguments.out)
    weights = arguments.out / "model.safetensors"
    print(f"exported {report['file_bytes']} bytes", flush=True)

    if not arguments.no_score:
        torch.set_float32_matmul_precision("highest")
        exported = load(arguments.out, device)
        heldout = TokenSet.load(SCRATCH / "tokens" / "heldout.npz")
        if arguments.tiny:
            heldout = heldout.first(2)
        score = score_model(exported, heldout, EOS_ID, window=arguments.length, batch=8)
        report |= {
            "heldout_bits_per_byte": score.bits_per_byte,
            "heldout_bytes": score.num_bytes,
            "by_source": score.by_source,
        }
        print(
            f"held-out bits per byte of the exported weights: {score.bits_per_byte:.4f} over {score.num_bytes} bytes",
            flush=True,
        )
        print(json.dumps(score.by_source), flush=True)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    if arguments.split_mib:
        subprocess.run(["split", "-b", f"{arguments.split_mib}M", "-d", weights, f"{weights}.part"], check=True)
    if not arguments.no_score:
        write_samples(exported, arguments.out / "samples.txt", 4 if arguments.tiny else 96)
        print((arguments.out / "samples.txt").read_text(), flush=True)
    if arguments.split_mib:
        weights.unlink()


if __name__ == "__main__":
    main()
