"""The command: files in and out, and the exit status 0, 1 or 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.checkpoints import base_config, random_prompt, write_checkpoint

from deltafold.cli import main
from deltafold.parity.golden import from_json, load, save, to_json

ENGINE = ("--device", "cpu", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def golden_file(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([random_prompt(0, 5), "In the beginning"]))
    path = folder / "golden.json"
    words = ["--model", str(tiny_folder), "--prompts", str(prompts), "--max-tokens", "4", "--ignore-eos"]
    assert main(["parity", "record", *words, "-o", str(path), *ENGINE]) == 0
    return path


def test_record_writes_what_load_takes(golden_file: Path) -> None:
    golden = load(golden_file)
    assert (golden.origin.engine, golden.origin.dtype, golden.origin.backend) == ("deltafold", "float32", "portable")
    assert [prompt.text for prompt in golden.prompts] == [None, "In the beginning"]
    assert (golden.max_tokens, golden.num_tokens, golden.ignore_eos) == (4, 8, True)


def test_no_mismatch_is_status_0(
    golden_file: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"), "--trace"]
    assert main(["parity", "compare", str(golden_file), "--model", str(tiny_folder), *files, *ENGINE]) == 0
    assert capsys.readouterr().out.startswith("verdict    identical\n")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["verdict"] == "identical"
    assert report["trace"]["findings"] == []
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")


def test_mismatch_is_status_1(
    golden_file: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = to_json(load(golden_file))
    step = document["prompts"][0]["steps"][2]
    step["top"] = [[token_id, logprob - 0.5] for token_id, logprob in step["top"]]
    step["logprob"] -= 0.5
    document["prompts"][0]["digest"] = "?"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document))
    command = ["parity", "compare", str(path), "--model", str(tiny_folder), *ENGINE]
    assert main(command) == 2
    assert "prompts[0]: digest does not fit" in capsys.readouterr().err
    save(_resealed(document), path)
    assert main(command) == 1
    assert "mismatch" in capsys.readouterr().out.splitlines()[0]
    assert main([*command, "--drift-tolerance", "2", "--tie-tolerance", "2", "--kl-tolerance", "2"]) == 0


def _resealed(document: dict[str, object]):  # type: ignore[no-untyped-def]
    """The golden run of an edited document, as if it had been recorded so."""
    from deltafold.parity import golden as module

    prompt = document["prompts"][0]  # type: ignore[index]
    body = {name: prompt[name] for name in ("text", "token_ids", "steps")}
    prompt["digest"] = module._digest(body)
    header = {name: value for name, value in document.items() if name not in ("digest", "prompts")}
    document["digest"] = module._header_digest(header, document["prompts"])  # type: ignore[arg-type]
    return from_json(document, "resealed")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "none.json"], "none.json: cannot be read"),
        (["compare", "{golden}", "--tie-tolerance", "0"], "tie tolerance must be a positive number of nats, got 0.0"),
        (["compare", "{golden}", "--json", "{missing}/x"], "cannot be written"),
        (["record", "--prompts", "none.txt", "-o", "x"], "none.txt: cannot be read"),
        (["record", "--prompts", "x", "-o", "x", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["record", "--prompts", "x", "-o", "x", "--engine", "openai"], "--base-url goes with --engine openai"),
        (["record", "--prompts", "x", "-o", "x", "--base-url", "y"], "--base-url goes with --engine openai"),
        (["record", "--prompts", "x", "-o", "x", "--served-model", "y"], "--served-model goes with --engine openai"),
    ],
)
def test_unusable_input_is_status_2(
    words: list[str],
    message: str,
    golden_file: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [word.format(golden=golden_file, missing=tmp_path / "missing") for word in words]
    assert main(["parity", *filled, "--model", str(tiny_folder), *ENGINE]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("deltafold: error: ")
    assert message in captured


def test_other_model_is_status_2(golden_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, base_config(), seed=5)
    assert main(["parity", "compare", str(golden_file), "--model", str(tmp_path), *ENGINE]) == 2
    assert "another model: model.fingerprint of the golden run is" in capsys.readouterr().err
