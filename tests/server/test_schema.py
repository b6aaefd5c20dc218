"""schemathesis on the server's own OpenAPI document: no 5xx, and every answer is one that the document announces."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.server.driving import CHAT, COMPLETIONS, request
from tests.server.fake_engine import FakeEngine

from deltafold import Engine
from deltafold.server.app import create_app

# A body can fit the document and still ask for what the engine refuses, a temperature of -1 say: limits of sampling
# values have one owner, which is not the document.
EXCLUDED = [positive_data_acceptance]
SMALL = settings(
    max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

# Of the rest the document cannot know which values an engine takes; the model's name, for one.
MEANINGFUL = ("prompt", "messages", "stream", "echo", "stop", "ignore_eos", "metadata", "user", "store", "suffix")

schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(FakeEngine(max_model_len=64)))


@schema.parametrize()
@SMALL
def test_over_the_fake_engine(case):
    case.call_and_validate(excluded_checks=EXCLUDED)


@pytest.fixture(scope="module")
def real_schema():
    with Engine.load("builtin", device="cpu", max_num_seqs=16, max_model_len=48, max_waiting=64) as engine:
        yield schemathesis.openapi.from_asgi("/openapi.json", create_app(engine))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_valid_bodies_over_the_built_in_model(real_schema, path):
    statuses = []

    @SMALL
    @given(case=real_schema[path]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def call(case):
        case.body = {name: value for name, value in case.body.items() if name in MEANINGFUL} | {"max_tokens": 3}
        statuses.append(case.call_and_validate(excluded_checks=EXCLUDED).status_code)

    call()
    assert statuses.count(200) >= 5, statuses


def test_the_document_names_every_route_and_every_failure():
    document = request(create_app(FakeEngine(), api_key="k"), "GET", "/openapi.json").json()
    assert set(document["paths"]) == {
        "/health", "/version", "/metrics", "/v1/models", "/v1/models/{model}", "/v1/completions",
        "/v1/chat/completions", "/tokenize", "/detokenize",
    }  # fmt: skip
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) == {"200", "400", "401", "404", "413", "415", "429", "500", "503"}
    assert not any(
        "422" in operation["responses"] for path in document["paths"].values() for operation in path.values()
    )
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert chat["security"] == [{"HTTPBearer": []}]
    assert "security" not in document["paths"]["/health"]["get"]
