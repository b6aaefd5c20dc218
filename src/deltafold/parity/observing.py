"""A model whose op calls go through an observer; the model itself, and all who hold it, are unchanged.

`recording.py` observes the engine's model, `following.py` the reference model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast, overload

from torch import Tensor

from deltafold.cache.memory import LayerCache
from deltafold.layers.batch import ForwardBatch
from deltafold.models import CausalLM
from deltafold.ops import Ops


class Observer(Protocol):
    """What sees the calls."""

    layer: int | None
    """The layer being computed; None outside the layers. Set by the observed model."""

    def op(self, name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Called in place of an op, with its arguments by name in the op list's order; returns its result."""

    def after_forward(self, hidden: Tensor) -> None:
        """Called with what a forward pass gives."""

    def after_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Called with what the output projection takes and gives."""


def observed(model: CausalLM, observer: Observer) -> CausalLM:
    """A copy of `model` (its tensors shared) that `observer` sees."""
    return cast(CausalLM, _ObservedModel(model, observer))


class _ObservedModel:
    def __init__(self, model: CausalLM, observer: Observer) -> None:
        self._model = copy.copy(model)
        self._model.ops = cast(Ops, _ObservedOps(model.ops, observer))
        self._observer = observer
        self.config = model.config
        self.ops = self._model.ops

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        self._observer.layer = None
        hidden = self._model.forward(batch, _MarkedCaches(caches, self._observer))
        self._observer.layer = None
        self._observer.after_forward(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        self._observer.after_logits(hidden, logits)
        return logits


class _MarkedCaches(Sequence[LayerCache]):
    """A model asks for its layers' caches in order: that tells which layer is being computed."""

    def __init__(self, caches: Sequence[LayerCache], observer: Observer) -> None:
        self._caches = caches
        self._observer = observer

    def __len__(self) -> int:
        return len(self._caches)

    @overload
    def __getitem__(self, index: int) -> LayerCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerCache]: ...
    def __getitem__(self, index: int | slice) -> LayerCache | Sequence[LayerCache]:
        if isinstance(index, int):
            self._observer.layer = index
        return self._caches[index]

    def __iter__(self) -> Iterator[LayerCache]:
        for i, cache in enumerate(self._caches):
            self._observer.layer = i
            yield cache


class _ObservedOps:
    """An op list whose calls an observer makes. What is not an op passes through."""

    def __init__(self, ops: Ops, observer: Observer) -> None:
        self._ops = ops
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if not hasattr(Ops, name):
            return function
        signature = inspect.signature(getattr(Ops, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind(None, *args, **kwargs).arguments)
            del arguments["self"]
            return self._observer.op(name, function, arguments)

        return call
