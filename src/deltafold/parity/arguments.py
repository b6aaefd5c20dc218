"""`deltafold parity record` and `deltafold parity compare`: their options and what they call. `cli.py` adds them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltafold import Engine, GoldenError, OptionError
from deltafold.parity.compare import Comparison, compare
from deltafold.parity.from_server import ServerSource
from deltafold.parity.from_transformers import TransformersSource
from deltafold.parity.golden import ENGINES, Golden, load, save
from deltafold.parity.page import html_page
from deltafold.parity.prompts import read_prompts
from deltafold.parity.record import EngineSource, Source, record
from deltafold.parity.report import json_report, text_report
from deltafold.parity.trace import MAX_DECODES, Trace, trace
from deltafold.parity.verdict import Verdict

API_KEY_VARIABLE = "DELTAFOLD_API_KEY"
"""Environment variable with the key for `--engine openai`; a command line would show it to others."""

AddOptions = Callable[[argparse.ArgumentParser], None]
LoadEngine = Callable[[argparse.Namespace], Engine]


def add_arguments(commands: Any, add_engine_options: AddOptions, load_engine: LoadEngine) -> None:
    """Adds `record` and `compare` to the subparsers of `parity`. `load_engine` makes an engine of the options that
    `add_engine_options` defines."""
    recording = commands.add_parser("record", help="make a golden run", allow_abbrev=False)
    recording.add_argument("--prompts", type=Path, required=True, help="one prompt a line, or JSON: texts or token ids")
    recording.add_argument("-o", "--output", type=Path, required=True, help="the golden run to write")
    recording.add_argument("--max-tokens", type=int, default=32, help="tokens after each prompt (default: 32)")
    recording.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")
    recording.add_argument(
        "--engine", choices=ENGINES, default="deltafold", help="what computes it (default: deltafold)"
    )
    recording.add_argument("--base-url", help="of --engine openai, e.g. http://localhost:8000/v1")
    recording.add_argument("--served-model", help="what --engine openai calls the model (default: its first)")
    add_engine_options(recording)
    recording.set_defaults(run=lambda arguments: _record(arguments, load_engine))

    comparing = commands.add_parser("compare", help="hold an engine to a golden run", allow_abbrev=False)
    comparing.add_argument("golden", type=Path, help="a file that `parity record` wrote")
    comparing.add_argument("--trace", action="store_true", help="name the first layer and op that leave tolerance")
    comparing.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    comparing.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    for name, meaning in (
        ("tie", "margin up to which another token is a near tie"),
        ("drift", "largest difference of a likely token's logprob"),
        ("kl", "mean divergence over a prompt"),
    ):
        comparing.add_argument(f"--{name}-tolerance", type=float, metavar="NATS", help=f"{meaning} (default: by dtype)")
    add_engine_options(comparing)
    comparing.set_defaults(run=lambda arguments: _compare(arguments, load_engine))


def _record(arguments: argparse.Namespace, load_engine: LoadEngine) -> int:
    if arguments.max_tokens < 1:
        raise OptionError(f"--max-tokens must be at least 1, got {arguments.max_tokens}")
    is_server = arguments.engine == "openai"
    if is_server != (arguments.base_url is not None):
        raise OptionError("--base-url goes with --engine openai, and is needed there")
    if arguments.served_model is not None and not is_server:
        raise OptionError("--served-model goes with --engine openai")
    with load_engine(arguments) as engine:
        prompts = read_prompts(arguments.prompts, engine)
        source = _source(arguments, engine)
        golden = record(prompts, source, engine, max_tokens=arguments.max_tokens, ignore_eos=arguments.ignore_eos)
    with _writing(arguments.output):
        save(golden, arguments.output)
    print(f"{arguments.output}: {len(golden.prompts)} prompts, {golden.num_tokens} tokens")
    return 0


def _source(arguments: argparse.Namespace, engine: Engine) -> Source:
    if arguments.engine == "deltafold":
        return EngineSource(engine)
    if arguments.engine == "openai":
        key = os.environ.get(API_KEY_VARIABLE)
        return ServerSource(arguments.base_url, engine, served_model=arguments.served_model, api_key=key)
    about = engine.describe()
    device = about["device"]
    return TransformersSource(arguments.model, dtype=about["dtype"], device=device, revision=arguments.revision)


def _compare(arguments: argparse.Namespace, load_engine: LoadEngine) -> int:
    golden = load(arguments.golden)
    tolerances = {name: getattr(arguments, f"{name}_tolerance") for name in ("tie", "drift", "kl")}
    with load_engine(arguments) as engine:
        comparison = compare(golden, engine, tolerances)
        found = trace_of(golden, comparison, engine) if arguments.trace else None
    print(text_report(comparison, found))
    if arguments.json is not None:
        with _writing(arguments.json):
            arguments.json.write_text(json.dumps(json_report(comparison, found), allow_nan=False), encoding="utf-8")
    if arguments.html is not None:
        with _writing(arguments.html):
            arguments.html.write_text(html_page(comparison, found), encoding="utf-8")
    return 1 if comparison.verdict is Verdict.MISMATCH else 0


def trace_of(golden: Golden, comparison: Comparison, engine: Engine) -> Trace:
    """A trace of the first prompt with the run's verdict, up to the first position with it, on the path that has it."""
    result = next(prompt for prompt in comparison.prompts if prompt.verdict is comparison.verdict)
    prompt = golden.prompts[result.index]
    decode, prefill = (
        next((p.index for p in path if p.verdict is not Verdict.IDENTICAL and p.verdict is result.verdict), None)
        for path in (result.decode, result.prefill)
    )
    if decode is None and prefill is not None:
        return trace(engine, prompt.token_ids + prompt.output_token_ids[:prefill], 0)
    num_output = MAX_DECODES if decode is None else max(1, decode)
    return trace(engine, prompt.token_ids + prompt.output_token_ids[:num_output], num_output)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GoldenError(f"{path}: cannot be written: {error.strerror}") from error
