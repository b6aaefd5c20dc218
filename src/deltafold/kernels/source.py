"""What a kernel is made of: its text, the functions and constants it uses, and its parameters, as comparable values.

Comments, docstrings, blank lines and line numbers do not count. `differences.py` compares it with what a pack says.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import io
import pkgutil
import tokenize

import triton.language as tl
from triton.runtime.jit import JITCallable, JITFunction

from deltafold.ops import triton as triton_ops

TEXT = "text "
"""Starts the digest of a function among constants."""

_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}


def all_kernels() -> dict[str, JITFunction]:
    """The kernels and jit functions of the GPU backend, by module and name."""
    found = {}
    for name in [module.name for module in pkgutil.iter_modules(triton_ops.__path__)]:
        module = importlib.import_module(f"{triton_ops.__name__}.{name}")
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                found[kernel_name(value)] = value
    return found


def kernel_name(kernel: JITCallable) -> str:
    """Module and name."""
    return f"{kernel.__module__}.{kernel.__name__}"


def source_parts(kernel: JITFunction) -> dict[str, str]:
    """By name: digests of the kernel's function and of those it calls, and the constants that any of them reads."""
    parts: dict[str, str] = {}
    _collect(kernel, parts)
    return dict(sorted(parts.items()))


def parameters(kernel: JITFunction) -> list[str]:
    """Each parameter with what its declaration says of specialisation."""
    marks = []
    for parameter in kernel.params:
        words = [parameter.name]
        if parameter.is_constexpr:
            words.append("constexpr")
        elif parameter.do_not_specialize:
            words.append("unspecialised")
        elif parameter.do_not_specialize_on_alignment:
            words.append("unaligned")
        marks.append(" ".join(words))
    return marks


def grid_rule(kernel: JITFunction) -> str:
    """What the kernel's docstring says of its grid, "" if nothing."""
    text = " ".join((kernel.fn.__doc__ or "").split())
    start = text.lower().find("grid (")
    if start < 0:
        return ""
    depth = 0
    for i, letter in enumerate(text[start:], start):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and depth == 0:
            return text[start + len("grid ") : i + 1]
    return ""


def _collect(function: JITCallable, parts: dict[str, str]) -> None:
    name = kernel_name(function)
    if name in parts:
        return
    parts[name] = f"{TEXT}{hashlib.sha256(_plain_text(function.src).encode()).hexdigest()[:16]}"
    tree = ast.parse(function.src)
    local = {argument.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for argument in node.args}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id in local:
            continue
        value = function.__globals__.get(node.id)
        if isinstance(value, JITCallable):
            if not value.__module__.startswith("triton."):  # its version stands for Triton's own functions
                _collect(value, parts)
        elif isinstance(value, tl.constexpr):
            parts[f"{function.__module__}.{node.id}"] = repr(value.value)
        elif isinstance(value, bool | int | float | str):
            parts[f"{function.__module__}.{node.id}"] = repr(value)


def _plain_text(source: str) -> str:
    """The function's tokens without comments and docstring."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in _SILENT]
    words = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == tokenize.STRING and before is not None and before.type == tokenize.INDENT:
            continue
        # Indentation counts by its depth alone.
        words.append(
            tokenize.tok_name[token.type] if token.type in (tokenize.INDENT, tokenize.DEDENT) else token.string
        )
    return " ".join(words)
