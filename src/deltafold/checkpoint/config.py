"""HF `config.json` -> a frozen `ModelConfig`: typed reads, no silent defaults, refusal of what is not supported.

Neighbours: `formats/` has a function for each architecture, `config_reader.py` does the typed reads, `models/` reads
the config, `weights.py` the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from deltafold.checkpoint.config_reader import ConfigReader
from deltafold.checkpoint.folder import read_json_object
from deltafold.checkpoint.formats.deepseek_v2 import parse_deepseek_v2
from deltafold.checkpoint.formats.kimi_linear import parse_kimi_linear
from deltafold.checkpoint.formats.qwen import parse_qwen3_5, parse_qwen3_5_moe, parse_qwen3_5_wrapped, parse_qwen3_next
from deltafold.checkpoint.formats.shared import HARMLESS_KEYS
from deltafold.checkpoint.model_config import (
    GqaConfig,
    LayerType,
    LinearAttentionConfig,
    MlaConfig,
    MlpType,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    YarnConfig,
)
from deltafold.errors import ConfigError

__all__ = [
    "GqaConfig",
    "LayerType",
    "LinearAttentionConfig",
    "MlaConfig",
    "MlpType",
    "ModelConfig",
    "MoeConfig",
    "RopeConfig",
    "YarnConfig",
    "load_config",
    "parse_config",
]


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the model in `folder`: its config.json, and the end tokens of generation_config.json.

    Raises:
        ConfigError: a file is not readable, or as for `parse_config`.
    """
    config = parse_config(read_json_object(folder / "config.json", ConfigError))
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return config
    reader = ConfigReader(read_json_object(generation, ConfigError), file=generation.name)
    extra = reader.token_ids("eos_token_id", vocab_size=config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))


def parse_config(raw: Mapping[str, object]) -> ModelConfig:
    """The configuration in `raw`, the content of a Hugging Face config.json.

    Raises:
        ConfigError: a key is missing, of a wrong type, out of range, contradicts another or is not supported; the
            message has the key, its value and the limit.
    """
    reader = ConfigReader(raw)
    names = reader.strings("architectures")
    supported = ", ".join(sorted(_PARSERS))
    if len(names) != 1 or names[0] not in _PARSERS:
        raise reader.error("architectures", list(names), f"must be exactly one of: {supported}")
    config = _PARSERS[names[0]](reader)
    reader.refuse_unread(HARMLESS_KEYS)
    return config


_PARSERS: Mapping[str, Callable[[ConfigReader], ModelConfig]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": parse_deepseek_v2,
        "KimiLinearForCausalLM": parse_kimi_linear,
        "Qwen3_5ForCausalLM": parse_qwen3_5,
        "Qwen3_5ForConditionalGeneration": parse_qwen3_5_wrapped,
        "Qwen3_5MoeForCausalLM": parse_qwen3_5_moe,
        "Qwen3_5MoeForConditionalGeneration": parse_qwen3_5_wrapped,
        "Qwen3NextForCausalLM": parse_qwen3_next,
    }
)
