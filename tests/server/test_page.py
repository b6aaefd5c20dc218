"""The chat page in headless Chromium: once with the built-in model, then with an engine whose pace is known."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.server.conftest import API_KEY
from tests.server.serving import FAKE, PATIENCE_SECONDS, ServerProcess

NODE = Path(__file__).parent / "node"
REPLY = "The sea is wide and deep. " * 40
SCENARIOS = ("turns", "stopButton", "escape", "reload", "clearWhileAnswering", "narrow", "refused", "tooLong")


def use_page(url: str, folder: Path, *scenarios: str) -> dict[str, dict]:
    assert shutil.which("/usr/bin/chromium"), "this test needs Debian's package chromium: apt-get install chromium"
    assert (NODE / "node_modules").is_dir(), "this test needs `npm ci` in tests/server/node"
    command = ["node", str(NODE / "page.mjs"), url, API_KEY, str(folder), *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    arguments = ("--reply", REPLY, "--max-model-len", "4096", "--api-key", API_KEY)
    with ServerProcess(*arguments, command=FAKE) as server:
        return use_page(server.url, tmp_path_factory.mktemp("page"), *SCENARIOS)


def test_send_and_stream_with_the_built_in_model(server, tmp_path):
    seen = use_page(server.url, tmp_path, "send")["send"]
    assert "failure" not in seen, seen
    assert seen["startFocus"] == seen["endFocus"] == "input"
    assert seen["isStopShown"]
    assert seen["answer"]
    assert len(seen["lengths"]) > 3  # it grew as it came
    assert "a second" in seen["status"]
    assert seen["model"] == "builtin, up to 2048 tokens"
    assert seen["hosts"] == [server.url.removeprefix("http://")]
    assert seen["problems"] == []
    assert (tmp_path / "wide.png").stat().st_size > 10_000


def test_turns_and_settings_are_sent(found):
    seen = found["turns"]
    first, second = seen["bodies"]
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert first["max_tokens"] == 5
    assert first["seed"] == 7
    assert second["messages"][2:] == [
        {"role": "assistant", "content": REPLY[:5]},
        {"role": "user", "content": "two\nlines"},
    ]
    assert seen["answers"] == [REPLY[:5]] * 2
    assert "cut at the length limit" in seen["status"]


@pytest.mark.parametrize("scenario", ["stopButton", "escape"])
def test_stopping_keeps_what_came(found, scenario):
    seen = found[scenario]
    assert seen.get("status") == "Stopped.", seen
    assert 0 < len(seen["answer"]) < 256
    assert REPLY.startswith(seen["answer"])


def test_the_load_is_live(found):
    seen = found["stopButton"]
    assert seen.get("running") == "1", seen
    assert seen["blocks"] == "0 of 32, 1 cached"
    assert seen["focus"] == "input"


def test_a_reload_keeps_the_conversation_and_ends_the_answer(found):
    seen = found["reload"]
    question, answer = seen["shown"]
    assert question == "go on"
    assert answer
    assert REPLY.startswith(answer)
    assert seen["temperature"] == "0.3"
    assert seen["numAfterClear"] == 0
    assert seen["isHintShown"]


def test_a_new_chat_ends_the_answer_and_starts_empty(found):
    assert found["clearWhileAnswering"] == {"numMessages": 0, "kept": "[]"}


def test_it_fits_a_phone(found):
    seen = found["narrow"]
    assert seen.get("width") == 360, seen
    assert seen["sendRight"] <= 360
    assert seen["sendWidth"] > 40


def test_refusals_are_shown(found):
    assert "Bearer" in found["refused"]["model"]
    assert "Bearer" in found["refused"]["error"]
    assert found["refused"]["isSendShown"]
    assert "4096" in found["tooLong"]["error"]
