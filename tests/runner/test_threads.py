"""Small steps run on one thread; whatever happens, the process gets its number of threads back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.checkpoints import random_prompt
from tests.stepping import LoadedModel, Stepper


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def watch(stepper: Stepper, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> list[int]:
    seen: list[int] = []
    forward = stepper.runner.recorder.forward

    def watching(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        if fails:
            raise RuntimeError("a defect")
        return forward(*arguments)

    monkeypatch.setattr(stepper.runner.recorder, "forward", watching)
    return seen


@pytest.mark.usefixtures("two_threads")
def test_a_large_step_takes_all_threads_and_small_ones_take_one(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Stepper(tiny, num_blocks=64)
    seen = watch(stepper, monkeypatch)
    assert tiny.config.hidden_size == 48
    for length in (1820, 1821):  # 2^22 / 48^2 = 1820.4
        stepper.add(random_prompt(length, length))
        stepper.step()
        assert torch.get_num_threads() == 2
        stepper.run()
        seen.append(0)
    firsts = [seen[0], seen[seen.index(0) + 1]]
    assert firsts == [1, 2]
    assert set(seen[1:32]) == {1}


@pytest.mark.usefixtures("two_threads")
def test_a_step_that_fails_gives_the_threads_back(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(tiny)
    watch(stepper, monkeypatch, fails=True)
    stepper.add(random_prompt(0, 5))
    with pytest.raises(RuntimeError, match="a defect"):
        stepper.step()
    assert torch.get_num_threads() == 2
