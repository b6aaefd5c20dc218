"""GPUs that packs are built for, with what launches depend on; and the model shapes known by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from deltafold.errors import OptionError


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU type as the compiler knows it, and one card of it whose sizes stand for all."""

    capability: int  # major * 10 + minor
    card: str
    num_multiprocessors: int
    shared_memory: int  # bytes a program may use


TARGETS: Mapping[str, Target] = {
    "sm_90": Target(90, "H200", num_multiprocessors=132, shared_memory=232448),
    "sm_121a": Target(121, "GB10", num_multiprocessors=48, shared_memory=101376),
}


def target_of(arch: str) -> Target:
    """OptionError for an architecture that is not in the table."""
    if arch not in TARGETS:
        raise OptionError(f"arch must be one of {', '.join(TARGETS)}, got {arch!r}")
    return TARGETS[arch]


def arch_of(capability: tuple[int, int]) -> str | None:
    """The name of a compute capability; None if no pack can be built for it."""
    number = capability[0] * 10 + capability[1]
    return next((arch for arch, target in TARGETS.items() if target.capability == number), None)


def published_config(name: str) -> dict[str, Any]:
    """config.json of a published model by its name here; OptionError for another name."""
    folder = files("deltafold") / "kernels" / "shapes"
    known = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
    if name not in known:
        raise OptionError(f"model_shape must be one of {', '.join(known)}, got {name!r}")
    config: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return config
