"""Every error deltafold raises on purpose.

DeltafoldError
├── RequestError (also a ValueError)      one request is wrong; the server answers 400
│   ├── UnsupportedOptionError            an option, field or value that does not exist here
│   ├── InvalidTokenError                 a token id outside the vocabulary
│   └── ContextLengthError                prompt + output do not fit max_model_len or the cache
├── LoadError                             a model cannot be loaded
│   ├── ConfigError                       config.json: key, value and limit
│   ├── WeightsError                      safetensors: every tensor concerned
│   ├── TokenizerError                    tokenizer files or chat template
│   └── SessionError                      a session's file: another model, dtype or format, or damaged
├── KernelPackError                       a kernel pack is damaged, or of other kernels, another GPU or model
├── GoldenError                           a golden run's file, or one that does not fit: the field concerned
├── OptionError (also a ValueError)       a wrong argument of Engine.load or the command line
├── DeviceError                           the device asked for is not there
├── CapacityError                         memory plan: asked for more than there is, with the numbers
├── QueueFullError                        max_waiting reached; the server answers 429
├── NumericalError                        a request's logits were not finite; the server answers 500
└── EngineClosedError                     the engine was closed, or died (then chained to the cause); 503

DeltafoldWarning (a UserWarning)          something was reduced, and says to what
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltafold.types import Completion


class DeltafoldError(Exception):
    """Root of the tree; catching it catches all that deltafold raises on purpose."""


class RequestError(DeltafoldError, ValueError):
    """One request is wrong. `param` names the field concerned, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedOptionError(RequestError):
    """An option, field or value that deltafold does not have."""


class InvalidTokenError(RequestError):
    """A token id outside `0 .. vocab_size - 1`."""


class ContextLengthError(RequestError):
    """Prompt and output together exceed what one request can have; the message has both numbers."""


class LoadError(DeltafoldError):
    """A model cannot be loaded."""


class ConfigError(LoadError):
    """config.json: a key is missing, has a wrong type, a value out of range, or is unsupported."""


class WeightsError(LoadError):
    """Tensors missing, left over, of a wrong shape or dtype, truncated or not finite: all of them are named."""


class TokenizerError(LoadError):
    """Tokenizer files or the chat template cannot be used."""


class SessionError(LoadError):
    """A session's file does not fit the engine (model, dtype, format), or is damaged; the message names the field."""


class KernelPackError(DeltafoldError):
    """A kernel pack is damaged, or of other kernels, versions, another GPU or model; the message says which."""


class GoldenError(DeltafoldError):
    """A golden run's file is damaged, edited, or of another model or tokenizer; the message names the field."""


class OptionError(DeltafoldError, ValueError):
    """A wrong argument of `Engine.load` or of the command line."""


class DeviceError(DeltafoldError):
    """The device asked for is not there."""


class CapacityError(DeltafoldError):
    """The memory plan does not fit; the message has what was asked for and what there is, in bytes."""


class QueueFullError(DeltafoldError):
    """As many requests wait as `max_waiting` allows."""


class NumericalError(DeltafoldError):
    """A request's logits were not finite, so nothing was sampled from them.

    `completions` holds what every request of the same call produced, the failed ones up to the failure.
    """

    def __init__(self, message: str, *, completions: Sequence[Completion] = ()) -> None:
        super().__init__(message)
        self.completions = tuple(completions)


class EngineClosedError(DeltafoldError):
    """The engine was closed, or its step loop died (then this is chained to the cause)."""


class DeltafoldWarning(UserWarning):
    """Something asked for was reduced; the message says from what to what."""
