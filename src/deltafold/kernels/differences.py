"""In words: where what a pack was built from differs from what is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton.runtime.jit import JITFunction

from deltafold.kernels.pack import PackedLaunch
from deltafold.kernels.source import TEXT, parameters, source_parts


def shape_differences(built: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Fields of the model that differ."""
    for name in sorted(built.keys() | here.keys()):
        if built.get(name) != here.get(name):
            yield f"{name} is {built.get(name)} in the pack and {here.get(name)} here"


def kernel_differences(built: Mapping[str, Mapping[str, Any]], here: Mapping[str, JITFunction]) -> Iterator[str]:
    """Kernels whose source or parameters differ, one line each."""
    for name, facts in sorted(built.items()):
        short = name.rpartition(".")[2]
        kernel = here.get(name)
        if kernel is None:
            yield f"{short}: there is no such kernel any more"
            continue
        if changed := list(_source_changes(facts["source"], source_parts(kernel))):
            yield f"{short}: source changed: {', '.join(changed)}"
        if facts["parameters"] != (now := parameters(kernel)):
            parts = [f"{a!r} is gone" for a in facts["parameters"] if a not in now]
            parts += [f"{a!r} is new" for a in now if a not in facts["parameters"]]
            yield f"{short}: signature changed: {', '.join(parts or ['another order'])}"


def pin_differences(built: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """Tables of pins that differ."""
    for name in sorted(built.keys() | here.keys()):
        if built.get(name) != here.get(name):
            yield f"pins of {name} changed"


def launch_differences(built: Sequence[PackedLaunch], here: Sequence[PackedLaunch]) -> Iterator[str]:
    """Kernels that are launched with other pins or other types than when the pack was built, one line each."""
    for name in sorted({one.kernel for one in (*built, *here)}):
        before = {one.key: one for one in built if one.kernel == name}
        now = {one.key: one for one in here if one.kernel == name}
        if before.keys() == now.keys():
            continue
        gone = [one for key, one in before.items() if key not in now]
        new = [one for key, one in now.items() if key not in before]
        changes = [*_value_changes("pin", gone, new, _pins), *_value_changes("type of", gone, new, _types)]
        if not gone or not new or not changes:
            changes.append(f"{len(gone)} specialisations are launched no more, {len(new)} are new")
        yield f"{name.rpartition('.')[2]}: {', '.join(changes)}"


def _source_changes(built: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(built.keys() | here.keys()):
        before, now = built.get(name), here.get(name)
        if before != now:
            is_value = any(value is not None and not value.startswith(TEXT) for value in (before, now))
            yield f"{name.rpartition('.')[2]} {before} -> {now}" if is_value else name.rpartition(".")[2]


def _pins(one: PackedLaunch) -> Mapping[str, Any]:
    return {**one.constants, **one.options}


def _types(one: PackedLaunch) -> Mapping[str, Any]:
    return {name: kind + (" by 16" if name in one.divisible else "") for name, kind in one.signature.items()}


def _value_changes(what: str, gone: Sequence[PackedLaunch], new: Sequence[PackedLaunch], values: Any) -> Iterator[str]:
    """Names whose set of values over the launches changed."""
    before, now = [values(one) for one in gone], [values(one) for one in new]
    for name in sorted({name for one in (*before, *now) for name in one}):
        a, b = ({str(one.get(name)) for one in some} for some in (before, now))
        if a != b and before and now:
            yield f"{what} {name} {'/'.join(sorted(a - b or a))} -> {'/'.join(sorted(b - a or b))}"
