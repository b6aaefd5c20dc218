"""The command line: what it prints, and that every mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import BUILTIN

import deltafold
from deltafold import Engine, SamplingParams
from deltafold.cli import main

PROMPT = "In the beginning"
GREEDY = ["--max-tokens", "12", "--temperature", "0", "--ignore-eos"]
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process: exit status, stdout, stderr."""

    def call(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            status = main(argv)
        except SystemExit as leave:
            status = int(leave.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def model(tiny_folder: Path) -> list[str]:
    return ["--model", str(tiny_folder), "--device", "cpu", "--max-num-seqs", "2"]


def test_complete_streams_prompt_and_text(run: Run, model: list[str], engine: Engine) -> None:
    status, out, err = run("complete", PROMPT, *model, *GREEDY)
    assert (status, err) == (0, "")
    assert out == PROMPT + engine.complete(PROMPT, PARAMS).text + "\n"


def test_complete_json_is_one_object(run: Run, model: list[str], engine: Engine) -> None:
    status, out, err = run("complete", PROMPT, *model, *GREEDY, "--json")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 1
    found = json.loads(out)
    expected = engine.complete(PROMPT, PARAMS)
    assert found.keys() == {"text", "prompt_token_ids", "token_ids", "finish_reason", "usage", "timings"}
    assert found["text"] == expected.text
    assert found["token_ids"] == list(expected.token_ids)
    assert found["prompt_token_ids"] == engine.encode(PROMPT)
    assert found["finish_reason"] == "length"
    usage = {"num_prompt_tokens": len(engine.encode(PROMPT)), "num_output_tokens": 12, "num_cached_tokens": 0}
    assert found["usage"] == usage
    assert all(isinstance(seconds, float) for seconds in found["timings"].values())


def test_sampling_options_reach_the_sampler(run: Run, model: list[str], engine: Engine) -> None:
    options = "--max-tokens 9 --temperature 1.7 --top-k 50 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.4 --seed 8"
    _, out, _ = run("complete", PROMPT, *model, *options.split(), "--ignore-eos", "--json")
    params = SamplingParams(
        max_tokens=9, temperature=1.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.4, seed=8, ignore_eos=True
    )
    assert json.loads(out)["token_ids"] == list(engine.complete(PROMPT, params).token_ids)


def test_stop_options(run: Run, model: list[str], engine: Engine) -> None:
    text = engine.complete(PROMPT, PARAMS).text
    stops = [text[5:7], text[3:5]]
    _, out, _ = run("complete", PROMPT, *model, *GREEDY, "--stop", stops[0], "--stop", stops[1], "--json")
    assert json.loads(out)["finish_reason"] == "stop"
    assert json.loads(out)["text"] == text[: min(text.find(stop) for stop in stops)]


def test_chat_on_piped_input_keeps_the_conversation(run: Run, model: list[str], engine: Engine) -> None:
    status, out, err = run("chat", *model, *GREEDY, "--system", "Be brief.", stdin="Who?\n\nÅnd whý?\n".encode())
    assert (status, err) == (0, "")
    session = engine.session()
    session.add_message({"role": "system", "content": "Be brief."})
    assert out == "".join(session.chat(line, PARAMS).text + "\n" for line in ("Who?", "Ånd whý?"))


def test_describe_is_json(run: Run, model: list[str]) -> None:
    status, out, err = run("describe", *model)
    assert (status, err) == (0, "")
    assert json.loads(out)["device"] == "cpu"
    assert json.loads(out)["model"]["name"] == model[1]


def test_convert_tokenizer_writes_and_says_what_it_verified(run: Run, tmp_path: Path) -> None:
    for file in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((BUILTIN / file).read_bytes())
    status, out, err = run("convert-tokenizer", str(tmp_path), "-o", str(tmp_path / "made.json"))
    assert (status, err) == (0, "")
    assert json.loads((tmp_path / "made.json").read_text())["model"]["type"] == "BPE"
    assert "made.json" in out


def test_python_m_deltafold_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "deltafold", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"deltafold {deltafold.__version__}\n"


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"deltafold {deltafold.__version__}\n", "")


@pytest.mark.filterwarnings("default::deltafold.errors.DeltafoldWarning")
def test_a_reduced_option_is_one_line_of_warning(run: Run, model: list[str]) -> None:
    status, out, err = run("describe", *model[:4], "--max-num-seqs", "60", "--memory", "300kB")
    assert status == 0
    assert json.loads(out)["limits"]["max_num_seqs"] < 60
    assert len(err.splitlines()) == 1
    assert err.startswith("deltafold: warning: max_num_seqs")


def test_an_interrupt_is_status_130(run: Run, model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "load", interrupted)
    assert run("complete", PROMPT, *model) == (130, "", "")


MISTAKES = {
    "no command": ([], "command"),
    "unknown command": (["finish", "x"], "finish"),
    "no prompt": (["complete"], "prompt"),
    "unknown option": (["complete", "x", "--tensor-parallel", "2"], "--tensor-parallel"),
    "abbreviated option": (["complete", "x", "--temp", "0"], "--temp"),
    "number as text": (["complete", "x", "--max-tokens", "many"], "many"),
    "max tokens": (["complete", "x", "--max-tokens", "0"], "max_tokens must be >= 1, got 0"),
    "temperature": (["complete", "x", "--temperature", "-1"], "-1.0"),
    "temperature nan": (["complete", "x", "--temperature", "nan"], "nan"),
    "top p": (["complete", "x", "--top-p", "0"], "top_p"),
    "seed": (["complete", "x", "--seed", str(2**70)], "seed"),
    "stop": (["complete", "x", "--stop", ""], "stop"),
    "device": (["complete", "x", "--device", "tpu"], "tpu"),
    "no such device": (["complete", "x", "--device", "cuda"], "cuda"),
    "dtype": (["complete", "x", "--dtype", "int8"], "int8"),
    "batched tokens": (["complete", "x", "--max-num-batched-tokens", "10"], "10"),
    "memory as text": (["complete", "x", "--memory", "lots"], "lots"),
    "memory unit": (["complete", "x", "--memory", "5GB!"], "5GB!"),
    "memory infinite": (["complete", "x", "--memory", "infGiB"], "infGiB"),
    "memory nan": (["complete", "x", "--memory", "nanGiB"], "nanGiB"),
    "memory too small": (["complete", "x", "--memory", "10"], "10 bytes"),
    "no such folder": (["complete", "x", "--model", "./no/such/folder"], "no/such/folder"),
    "revision of a folder": (["complete", "x", "--revision", "main"], "revision"),
    "empty prompt": (["complete", ""], "empty"),
    "prompt of stray bytes": (["complete", "a\udcffb"], "surrogate"),
    "long prompt": (["complete", "x " * 200, "--max-model-len", "64"], "64"),
    "no tokens left": (["complete", "x", "--max-model-len", "64", "--max-tokens", "64"], "64"),
    "chat: temperature": (["chat", "--temperature", "-1"], "-1.0"),
    "chat: context": (["chat", "--max-model-len", "8"], "8"),
    "describe: folder": (["describe", "--model", "./no/such/folder"], "no/such/folder"),
    "convert: folder": (["convert-tokenizer", "./no/such/folder"], "no/such/folder"),
    "convert: output": (["convert-tokenizer", str(BUILTIN), "-o", "/no/such/folder/x.json"], "x.json"),
    "convert: output is a folder": (["convert-tokenizer", str(BUILTIN), "-o", "/"], "/"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(
    name: str, run: Run, model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv, wanted = MISTAKES[name]
    if argv and argv[0] in ("complete", "chat", "describe") and "--model" not in argv and len(argv) > 1:
        argv = [*argv, *model[:2]] if "--device" in argv else [*argv, *model]
    status, out, err = run(*argv, stdin=b"hello, who is there?\n")
    assert_one_line_error(status, err, wanted)
    assert out == ""


def assert_one_line_error(status: int, err: str, wanted: str) -> None:
    assert status == 2
    assert len(err.splitlines()) == 1, err
    assert "error: " in err
    assert wanted in err
    assert "Traceback" not in err


def test_a_broken_checkpoint_is_one_line(run: Run, model: list[str], tmp_path: Path) -> None:
    """However many tensors it names."""
    for file in Path(model[1]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % 3}
    save_file(kept | {"foreign.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    status, out, err = run("complete", PROMPT, "--model", str(tmp_path), "--device", "cpu")
    assert_one_line_error(status, err, "foreign.weight")
    assert out == ""


def test_stray_bytes_on_stdin_are_one_line(run: Run, model: list[str]) -> None:
    status, _, err = run("chat", *model, *GREEDY, stdin=b"caf\xe9\n")
    assert_one_line_error(status, err, "UTF-8")


def process(argv: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, check=False, **options)  # type: ignore[call-overload]


ONLY_WHAT_IT_NEEDS = """
import sys
from deltafold.cli import main
status = main(sys.argv[1:])
roots = {name.partition(".")[0] for name in sys.modules}
unwanted = roots & {"transformers", "fla", "accelerate", "triton", "huggingface_hub", "fastapi", "uvicorn", "pytest"}
print(sorted(unwanted), status)
"""


def test_a_process_imports_no_transformers_and_not_what_it_does_not_use(model: list[str], engine: Engine) -> None:
    done = process(["-c", ONLY_WHAT_IT_NEEDS, "complete", PROMPT, *model, *GREEDY])
    assert done.stderr == ""
    assert done.stdout == PROMPT + engine.complete(PROMPT, PARAMS).text + "\n[] 0\n"


def test_the_module_is_a_command_whose_errors_have_no_traceback(model: list[str]) -> None:
    done = process(["-m", "deltafold.cli", "complete", PROMPT, *model, "--top-k", "-3"])
    assert done.stdout == ""
    assert_one_line_error(done.returncode, done.stderr, "top_k must be >= 0, got -3")


def test_a_reader_that_leaves_is_no_error(model: list[str]) -> None:
    command = f'"{sys.executable}" -m deltafold.cli complete "{PROMPT}" {" ".join(model)} --max-tokens 400 --ignore-eos'
    script = f"set -o pipefail; {command} | head -c 1; echo; echo status $?"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == PROMPT[0]
    assert done.stderr == ""
