"""The model in the package: its size, its parts, its fit to text it never saw, and its ids beside transformers'."""

from __future__ import annotations

import json
import lzma
import math
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from deltafold import Engine, SamplingParams

FOLDER = Path(str(files("deltafold") / "builtin"))
WINDOW = 2048


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine.load(device="cpu", prefix_cache=False, max_num_seqs=4) as engine:
        yield engine


def test_size_and_parts() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    linear = config["linear_attn_config"]
    assert (FOLDER / "model.safetensors").stat().st_size <= 32_000_000
    assert len(linear["kda_layers"]) >= 6
    assert len(linear["full_attn_layers"]) >= 2
    assert config["num_experts"] >= 8
    assert config["first_k_dense_replace"] == 1
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        float32 = {name for name in names if file.get_slice(name).get_dtype() == "F32"}
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in names
    assert float32 == {n for n in names if n.endswith(("A_log", "dt_bias", "e_score_correction_bias"))}
    assert (FOLDER / "NOTICE").exists()


def test_held_out_bits_per_byte(engine: Engine) -> None:
    text = (FOLDER / "heldout_sample.txt").read_text(encoding="utf-8")[:24_000]
    ids = engine.encode(text)
    assert engine.decode(ids) == text
    bits = 0.0
    for start in range(0, len(ids), WINDOW // 2):  # each token is scored with at least half a window before it
        window = ids[max(0, start - WINDOW // 2) : start + WINDOW // 2]
        completion = engine.complete_tokens(window, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        num_new = min(len(ids) - start, WINDOW // 2)
        assert completion.prompt_logprobs is not None
        for entry in completion.prompt_logprobs[-num_new:]:
            # The very first token has nothing before it; it is charged what a uniform guess would cost.
            bits += math.log2(engine.vocab_size) if entry is None else -entry.logprob / math.log(2)
    bits_per_byte = bits / len(text.encode())
    assert bits_per_byte <= 1.9
    assert bits_per_byte < 8 * len(lzma.compress(text.encode(), preset=9)) / len(text.encode())


def test_greedy_text_is_readable(engine: Engine) -> None:
    completion = engine.complete("In the beginning", SamplingParams(max_tokens=64, temperature=0))
    words = completion.text.split()
    assert len(words) >= 30
    assert len(set(words)) >= 15  # not one phrase over and over
    assert completion.text.isascii()


def test_chat_ends_by_itself(engine: Engine) -> None:
    completion = engine.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=80, temperature=0))
    assert completion.finish_reason == "stop"
    assert "<|" not in completion.text


def test_ids_equal_transformers(engine: Engine) -> None:
    from transformers import KimiLinearForCausalLM

    oracle = KimiLinearForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for prompt in ("In the beginning", "kindness (noun):", "The SELECT statement " * 12):
        ids = engine.encode(prompt)
        ours = engine.complete_tokens(ids, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=0))
        with torch.inference_mode():
            made = oracle.generate(
                torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=4095
            )
            logits = oracle(made).logits[0, len(ids) - 1 : -1]
        assert list(ours.token_ids) == made[0, len(ids) :].tolist()
        expected = torch.log_softmax(logits.double(), -1).gather(1, made[0, len(ids) :, None])[:, 0]
        found = torch.tensor([entry.logprob for entry in ours.logprobs or ()], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
