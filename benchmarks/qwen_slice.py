"""Four layers at the shape of Qwen3.5-35B-A3B with random weights on one GPU, beside transformers: three Gated DeltaNet
layers, one attention layer, 256 experts each.

Decode is a step of one request behind 1,024 tokens; prefill is 4,096 tokens to the first token. transformers runs its
fastest kernels that are installed (`fla-core`, if there), eagerly, as it does for `generate`.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shutil
import tempfile
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from benchmarks.full_shape import Bench

DECODE_CONTEXT, DECODE_STEPS, PREFILL = 1024, 64, 4096
TARGETS = {"decode": 3.0, "prefill": 1.5}
"""How many times as fast as transformers."""


def slice_config(num_layers: int) -> dict[str, Any]:
    """config.json of the first layers of the text model."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": num_layers,
        "layer_types": [("linear_attention", "full_attention")[i % 4 == 3] for i in range(num_layers)],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
    }


def write_folder(folder: Path, num_layers: int) -> None:
    """A model's folder without weights, with the built-in model's tokenizer."""
    with as_file(files("deltafold") / "builtin") as builtin:
        for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(builtin / name, folder / name)
    (folder / "config.json").write_text(json.dumps(slice_config(num_layers)))


def ours(num_layers: int) -> dict[str, float]:
    """Milliseconds of a decode step and of a prefill."""
    from deltafold import Engine

    with tempfile.TemporaryDirectory() as path:
        write_folder(Path(path), num_layers)
        start = time.perf_counter()
        engine = Engine.load(
            path,
            device="cuda",
            dtype="bfloat16",
            weights="random",
            max_num_seqs=2,
            max_num_batched_tokens=PREFILL,
            max_model_len=2 * PREFILL,
            memory=2**31,
            prefix_cache=False,
            seed=0,
        )
        with engine:
            print(f"loaded in {time.perf_counter() - start:.1f} s: {json.dumps(engine.describe())}", flush=True)
            bench = Bench(engine)
            bench.seconds(1, DECODE_CONTEXT, 8)
            decode = bench.decode_ms(1, DECODE_CONTEXT, DECODE_STEPS)
            return {"decode": decode, "prefill": 1000 * bench.seconds(1, PREFILL, 1, repeats=3)}


@torch.inference_mode()
def theirs(num_layers: int) -> dict[str, float]:
    """The same of transformers."""
    from transformers import DynamicCache, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(**slice_config(num_layers))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3_5MoeForCausalLM(config).eval()
    torch.set_default_dtype(default)
    generator = torch.Generator("cuda").manual_seed(0)

    def run(length: int, num_steps: int) -> tuple[float, float]:
        """Milliseconds of a prefill and of a step after it."""
        cache = DynamicCache(config=config)
        token_ids = torch.randint(163840, (1, length), device="cuda", generator=generator)
        moments = []
        for _ in range(1 + num_steps):
            torch.cuda.synchronize()
            moments.append(time.perf_counter())
            logits = model(token_ids, cache=cache, use_cache=True, logits_to_keep=1).logits
            token_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        step = (moments[-1] - moments[1]) / max(1, num_steps)
        return 1000 * (moments[1] - moments[0]), 1000 * step

    run(DECODE_CONTEXT, 8)
    run(PREFILL, 0)
    return {
        "decode": min(run(DECODE_CONTEXT, DECODE_STEPS)[1] for _ in range(2)),
        "prefill": min(run(PREFILL, 0)[0] for _ in range(3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    found = {"deltafold": ours(arguments.layers)}
    print(json.dumps(found), flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    found["transformers"] = theirs(arguments.layers)
    for name, target in TARGETS.items():
        a, b = found["deltafold"][name], found["transformers"][name]
        print(f"{name:8} {a:9.3f} ms beside {b:9.3f} ms: {b / a:.2f} x, target {target} x", flush=True)
    place = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps(found | {"place": place}))


if __name__ == "__main__":
    main()
