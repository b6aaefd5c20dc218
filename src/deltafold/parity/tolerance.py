"""How far two correct engines may be apart, in nats, by the coarsest dtype that either of them rounds to.

`docs/numerics.md` has the measurements behind the figures and the command that repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deltafold import OptionError
from deltafold.parity.golden import Origin

LIKELY = math.log(0.01)
"""A token is likely from this logprob (nats) on: below it rounding moves a logprob without touching what is chosen."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits in nats; `reason` says where they come from.

    `tie`: how much more likely than the other side's token a side may find its best one. `drift`: by how much the
    logprob of a likely token may differ at one position. `kl`: mean divergence over one prompt's positions.
    """

    tie: float
    drift: float
    kl: float
    reason: str


FLOAT32 = Tolerance(tie=1e-3, drift=4e-4, kl=1e-6, reason="both sides compute in float32")
BFLOAT16 = Tolerance(tie=3.0, drift=5.0, kl=0.05, reason="")


def tolerance_between(golden: Origin, ours: Origin, overrides: Mapping[str, float | None] | None = None) -> Tolerance:
    """The tolerance for a pair of engines; `overrides` by field name, None for none.

    OptionError for an override that is not positive and finite.
    """
    tolerance = FLOAT32
    for side, origin in (("the golden run", golden), ("our engine", ours)):
        for name in ("dtype", "residual_dtype"):
            if (dtype := getattr(origin, name)) != "float32":
                tolerance = replace(BFLOAT16, reason=f"{side} has {name} {dtype}")
    for name, value in (overrides or {}).items():
        if value is not None:
            if not (math.isfinite(value) and value > 0):
                raise OptionError(f"{name} tolerance must be a positive number of nats, got {value!r}")
            tolerance = replace(tolerance, **{name: value}, reason=f"{tolerance.reason}; {name} given")
    return tolerance
