"""The `deltafold` command: argument parsing and calls into the public surface, nothing else."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import deltafold
from deltafold import (
    DeltafoldError,
    DeltafoldWarning,
    Engine,
    OptionError,
    RequestError,
    SamplingParams,
    Session,
    TokenStream,
)
from deltafold.parity.arguments import add_arguments as add_parity_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0 on success, 2 on an error (one line on stderr), 130 when interrupted."""
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows its escape instead
            stream.reconfigure(errors="backslashreplace")
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        arguments = _parser(words).parse_args(words)
        result: int = arguments.run(arguments)
    except DeltafoldError as error:
        print(f"deltafold: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout is gone; the interpreter must not complain about it at exit
        return 0
    except KeyboardInterrupt:
        return 130
    return result


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="deltafold", description="Run hybrid linear-attention language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"deltafold {deltafold.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    complete = _command(commands, "complete", _complete, "complete a prompt")
    complete.add_argument("prompt", help="the text to complete")
    _add_engine_arguments(complete)
    _add_sampling_arguments(complete)
    complete.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")

    chat = _command(commands, "chat", _chat, "talk to the model, turn by turn")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--session", type=Path, metavar="FILE", help="go on from this file if it is there, and write it")
    _add_engine_arguments(chat)
    _add_sampling_arguments(chat)

    serve = _command(commands, "serve", _serve, "serve OpenAI's HTTP interface")
    _add_engine_arguments(serve)
    serve.add_argument("--max-waiting", type=int, help="most requests that wait; further ones get 429")
    if words[:1] == ["serve"]:  # the web framework takes a while to import, and only this command needs it
        from deltafold.server.run import add_arguments

        add_arguments(serve)

    describe = _command(commands, "describe", _describe, "print what a model is loaded as, as JSON")
    _add_engine_arguments(describe)

    plan = _command(commands, "plan", _plan, "say how many sequences a memory holds; needs no GPU and no weights")
    plan.add_argument("--model", default="builtin", help="builtin (default), a folder, or a hub id")
    plan.add_argument("--revision", help="revision of a hub id")
    plan.add_argument("--memory", type=_byte_count, required=True, help="of the device, e.g. 80GiB")
    plan.add_argument("--context", type=int, required=True, help="tokens of each sequence, prompt and output")
    plan.add_argument("--dtype", default="auto", help="auto (default: the checkpoint's), float32 or bfloat16")
    plan.add_argument("--max-num-seqs", type=int, default=64, help="most requests in one step (default: 64)")
    plan.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="most prompt tokens in one step (default: 2048)"
    )
    plan.add_argument("--free-memory-floor", type=float, default=0.06, help="share that stays free (default: 0.06)")

    parity_help = "record golden runs and hold engines to them"
    parity = commands.add_parser("parity", help=parity_help, description=parity_help, allow_abbrev=False)
    actions = parity.add_subparsers(dest="action", required=True, parser_class=_Parser)
    add_parity_arguments(actions, _add_engine_arguments, _load)

    kernels_help = "compile kernels ahead of time, and check that they have not drifted"
    kernels = commands.add_parser("kernels", help=kernels_help, description=kernels_help, allow_abbrev=False)
    _add_kernel_actions(kernels.add_subparsers(dest="action", required=True, parser_class=_Parser))

    convert = _command(commands, "convert-tokenizer", _convert, "make a verified tokenizer.json of tiktoken ranks")
    convert.add_argument("model", type=Path, help="folder with tiktoken.model and tokenizer_config.json")
    convert.add_argument(
        "-o",
        "--output",
        type=Path,
        help="file to write, replacing one that is there (default: tokenizer.json in the folder)",
    )
    return parser


def _command(commands: Any, name: str, run: Any, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _add_kernel_actions(actions: Any) -> None:
    build = _command(actions, "build", _build_kernels, "compile all that a model launches; needs no GPU")
    build.add_argument("--arch", action="append", required=True, help="sm_90 or sm_121a (repeatable)")
    which = build.add_mutually_exclusive_group(required=True)
    which.add_argument("--model-shape", help="a published model by name: kimi-linear-48b")
    which.add_argument("--model", help="builtin, a folder with config.json, or a hub id")
    build.add_argument("--revision", help="revision of a hub id")
    build.add_argument("--dtype", default="auto", help="auto (default: the checkpoint's), float32 or bfloat16")
    build.add_argument("--residual-dtype", default="float32", help="float32 (default) or bfloat16")
    build.add_argument("--max-num-seqs", type=int, default=128, help="most requests in one step (default: 128)")
    build.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="most prompt tokens in one step (default: 8192)"
    )
    build.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    check = _command(actions, "check", _check_kernels, "say what changed since a pack was built; 1 if anything did")
    check.add_argument("pack", type=Path, help="what kernels build wrote")
    tune = _command(actions, "tune", _tune_kernels, "measure launch configurations on this GPU and pin the best")
    tune.add_argument("--kernel", action="append", required=True, help="a table of pins, e.g. mla_decode (repeatable)")
    tune.add_argument("-o", "--output", type=Path, help="folder for the tables (default: the package's own)")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="builtin", help="builtin (default), a folder, or a hub id")
    group.add_argument("--revision", help="revision of a hub id")
    group.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    group.add_argument("--dtype", default="auto", help="auto (default), float32 or bfloat16")
    group.add_argument("--residual-dtype", default="float32", help="float32 (default) or bfloat16")
    group.add_argument("--backend", help="which ops run: portable, triton or reference (default: the device's)")
    group.add_argument("--kernel-pack", type=Path, help="kernels compiled ahead for this model and GPU")
    group.add_argument("--max-num-seqs", type=int, default=64, help="most requests in one step (default: 64)")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="most prompt tokens in one step (default: 2048)"
    )
    group.add_argument("--max-model-len", type=int, help="most tokens of one request")
    group.add_argument("--memory", type=_byte_count, help="for cache blocks and state slots, e.g. 512MiB or 4GiB")
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    group.add_argument("--max-snapshots", type=int, default=64, help="most state snapshots on the device (default: 64)")
    group.add_argument("--snapshot-interval", type=int, default=4096, help="tokens between snapshots (default: 4096)")
    group.add_argument("--weights", default="checkpoint", help="checkpoint (default), or random for benchmarks")
    group.add_argument("--no-decode-graphs", action="store_true", help="run every decode step of a GPU eagerly")
    group.add_argument(
        "--free-memory-floor", type=float, default=0.06, help="share of a GPU's memory that stays free (default: 0.06)"
    )
    group.add_argument(
        "--host-memory",
        type=_byte_count,
        default=2**30,
        help="more snapshots, preempted requests, sessions (default: 1GiB)",
    )


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, help="most tokens to generate (default: up to the context limit)")
    group.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    group.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens (default: 0, all)")
    group.add_argument("--top-p", type=float, default=1.0, help="keep this much probability (default: 1, all)")
    group.add_argument("--min-p", type=float, default=0.0, help="drop tokens less likely than this share of the best")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 avoids seen tokens (default: 1)")
    group.add_argument("--seed", type=int, help="makes sampling reproducible")
    group.add_argument("--stop", action="append", default=[], help="a string that ends the text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")


def _load(arguments: argparse.Namespace, *, max_waiting: int | None = None) -> Engine:
    return Engine.load(
        arguments.model,
        revision=arguments.revision,
        device=arguments.device,
        dtype=arguments.dtype,
        residual_dtype=arguments.residual_dtype,
        backend=arguments.backend,
        kernel_pack=arguments.kernel_pack,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        max_waiting=max_waiting,
        memory=arguments.memory,
        prefix_cache=not arguments.no_prefix_cache,
        max_snapshots=arguments.max_snapshots,
        snapshot_interval=arguments.snapshot_interval,
        host_memory=arguments.host_memory,
        decode_graphs=not arguments.no_decode_graphs,
        free_memory_floor=arguments.free_memory_floor,
        weights=arguments.weights,
    )


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
    )


def _complete(arguments: argparse.Namespace) -> int:
    params = _sampling_params(arguments)
    with _load(arguments) as engine:
        if arguments.json:
            start = time.perf_counter()
            completion = engine.complete(arguments.prompt, params)
            seconds = time.perf_counter() - start
            load_seconds = engine.describe()["model"]["load_seconds"]
            print(
                json.dumps(
                    {
                        "text": completion.text,
                        "prompt_token_ids": completion.prompt_token_ids,
                        "token_ids": completion.token_ids,
                        "finish_reason": completion.finish_reason,
                        "usage": {
                            "num_prompt_tokens": completion.usage.num_prompt_tokens,
                            "num_output_tokens": completion.usage.num_output_tokens,
                            "num_cached_tokens": completion.usage.num_cached_tokens,
                        },
                        "timings": {"load_seconds": load_seconds, "complete_seconds": round(seconds, 4)},
                    }
                )
            )
        else:
            stream = engine.stream(arguments.prompt, params)  # refuses a bad prompt before it is printed
            print(arguments.prompt, end="", flush=True)
            _print_stream(stream)
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    params = _sampling_params(arguments)
    path: Path | None = arguments.session
    if path is not None and not path.absolute().parent.is_dir():
        raise OptionError(f"--session {path}: there is no folder {path.absolute().parent}")
    with _load(arguments) as engine:
        session = engine.restore(path) if path is not None and path.exists() else engine.session()
        if arguments.system is not None:
            if session.messages:
                raise OptionError(f"--system is for a new conversation, and {path} holds one already")
            session.add_message({"role": "system", "content": arguments.system})
        while (line := _read_line()) is not None:
            if line.strip():
                _answer(session, line, params, path)
    return 0


def _answer(session: Session, line: str, params: SamplingParams, path: Path | None) -> None:
    """One turn. What is wrong with this message alone ends neither the conversation nor the command on a terminal."""
    try:
        stream = session.stream_chat(line, params)
    except RequestError as error:
        if not sys.stdin.isatty():
            raise
        print(f"deltafold: error: {error}", file=sys.stderr)
        return
    session.add_answer(_print_stream(stream))
    if path is not None:
        session.save(path)


def _read_line() -> str | None:
    """What the user says next; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not {error.encoding.upper()}: byte {error.object[error.start]:#04x}") from error


def _print_stream(stream: TokenStream) -> str:
    """Prints a completion as it comes, and a newline; returns its text."""
    parts = []
    try:
        with stream:
            for output in stream:
                print(output.text, end="", flush=True)
                parts.append(output.text)
    finally:  # also when interrupted: what comes next on the terminal starts on a line of its own
        print(flush=True)
    return "".join(parts)


def _serve(arguments: argparse.Namespace) -> int:
    from deltafold.server.run import serve

    with _load(arguments, max_waiting=arguments.max_waiting) as engine:
        serve(
            engine,
            host=arguments.host,
            port=arguments.port,
            served_model_name=arguments.served_model_name,
            api_key=arguments.api_key,
            cors_origins=arguments.cors_origins,
            drain_seconds=arguments.drain_seconds,
            max_body_bytes=arguments.max_body_bytes,
        )
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    with _load(arguments) as engine:
        print(json.dumps(engine.describe(), indent=2))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    plan = deltafold.plan_capacity(
        arguments.model,
        revision=arguments.revision,
        memory=arguments.memory,
        context=arguments.context,
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        free_memory_floor=arguments.free_memory_floor,
    )
    print(plan)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    report = deltafold.convert_tokenizer(arguments.model, arguments.output)
    print(report)
    return 0


def _build_kernels(arguments: argparse.Namespace) -> int:
    summary = deltafold.build_kernels(
        arguments.output,
        arch=arguments.arch,
        model_shape=arguments.model_shape,
        model=arguments.model,
        revision=arguments.revision,
        dtype=arguments.dtype,
        residual_dtype=arguments.residual_dtype,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    print(summary)
    return 0


def _check_kernels(arguments: argparse.Namespace) -> int:
    drift = deltafold.check_kernels(arguments.pack)
    print(drift)
    return int(bool(drift.differences))


def _tune_kernels(arguments: argparse.Namespace) -> int:
    for tuned in deltafold.tune_kernels(arguments.kernel, arguments.output):
        print(tuned)
    return 0


def _byte_count(text: str) -> int:
    """Bytes of `512MiB`, `4GiB`, `100MB` or a plain number."""
    units = {
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
    unit = next((unit for unit in units if text.endswith(unit)), None)
    try:
        number = int(text) if unit is None else float(text.removesuffix(unit)) * units[unit]
        return int(number)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"must be a finite number of bytes or end in {', '.join(units)}, got {text!r}"
        ) from None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line a warning; ours need no source line."""
    where = "" if issubclass(category, DeltafoldWarning) else f"{filename}:{lineno}: {category.__name__}: "
    print(f"deltafold: warning: {where}{message}", file=file or sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
