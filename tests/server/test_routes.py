"""Models, version, tokens and metrics: the routes that generate nothing."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.driving import CHAT, COMPLETIONS, post, request, user
from tests.server.fake_engine import NUM_BLOCKS, FakeEngine

from deltafold import API_VERSION, __version__
from deltafold.server.app import create_app
from deltafold.server.metrics import ServerMetrics

APP = create_app(FakeEngine())


def test_models_has_the_served_name():
    app = create_app(FakeEngine(), served_model_name="org/kimi")
    (card,) = request(app, "GET", "/v1/models").json()["data"]
    assert card["id"] == "org/kimi"
    assert card["max_model_len"] == 256
    assert request(app, "GET", "/v1/models/org/kimi").json() == card
    assert request(app, "GET", "/v1/models/fake").status_code == 404
    body = post(app, COMPLETIONS, model="org/kimi", prompt="x").json()
    assert body["model"] == "org/kimi"


def test_version():
    assert request(APP, "GET", "/version").json() == {"version": __version__, "api_version": API_VERSION}


def test_tokenize_and_back():
    body = post(APP, "/tokenize", prompt="ß!").json()
    assert body == {"tokens": [0xC3, 0x9F, 0x21], "count": 3, "max_model_len": 256}
    assert post(APP, "/detokenize", tokens=[*body["tokens"], 256]).json() == {"prompt": "ß!<|control_256|>"}
    assert post(APP, "/tokenize", prompt="").json()["tokens"] == []


def test_a_text_too_long_for_the_event_loop_gives_the_same_ids():
    text = "ab" * 5000
    assert post(APP, "/tokenize", prompt=text).json()["tokens"] == list(text.encode())
    assert post(APP, "/tokenize", messages=user(text)).json()["tokens"] == [257, *text.encode()]


def test_tokenize_sees_what_chat_sees():
    tokens = post(APP, "/tokenize", messages=user("hi")).json()["tokens"]
    usage = post(APP, CHAT, messages=user("hi"), max_tokens=1).json()["usage"]
    assert len(tokens) == usage["prompt_tokens"]


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": user("x")}, {"prompt": 1}, {"messages": []}])
def test_tokenize_takes_exactly_one_of_both(body):
    assert post(APP, "/tokenize", **body).status_code == 400


@pytest.mark.parametrize("token_id", [-1, 260])
def test_an_id_outside_the_vocabulary_is_a_400(token_id):
    response = post(APP, "/detokenize", tokens=[1, token_id])
    assert response.status_code == 400
    assert str(token_id) in response.json()["error"]["message"]
    assert post(APP, COMPLETIONS, prompt=[1, token_id]).status_code == 400


def samples(app) -> dict:
    response = request(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(response.text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_metrics_count_what_happened():
    app = create_app(FakeEngine())
    post(app, COMPLETIONS, prompt="hi", max_tokens=5, stream=True)
    post(app, CHAT, messages=user("hi"), max_tokens=3)
    post(app, COMPLETIONS, prompt=5)
    found = samples(app)
    assert found["deltafold_output_tokens_total",] == 8
    assert found["deltafold_time_to_first_token_seconds_count",] == 1
    assert found["deltafold_inter_token_seconds_count",] == 4
    assert found["deltafold_request_seconds_count", CHAT] == 1
    assert found["deltafold_http_requests_total", COMPLETIONS, "200"] == 1
    assert found["deltafold_http_requests_total", COMPLETIONS, "400"] == 1
    assert found["deltafold_blocks_free",] == NUM_BLOCKS - 1
    assert found["deltafold_blocks_cached",] == 1
    assert found["deltafold_blocks_used",] == 0
    assert found["deltafold_state_slots_free",] == 8
    assert found["deltafold_engine_up",] == 1
    for name in ("requests_running", "requests_waiting", "preemptions_total", "prefix_cached_tokens_total"):
        assert found[f"deltafold_{name}",] == 0


def test_a_histogram_counts_up_to_and_with_its_bounds():
    metrics = ServerMetrics(FakeEngine())
    for seconds in (0.001, 0.005, 0.0051, 70.0):
        metrics.time_to_first_token.observe(seconds)
    families = text_string_to_metric_families(metrics.render().decode())
    family = next(family for family in families if family.name == "deltafold_time_to_first_token_seconds")
    counts = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    assert (counts["0.005"], counts["0.01"], counts["60.0"], counts["+Inf"]) == (2, 3, 3, 4)
    assert {sample.name.rpartition("_")[2]: sample.value for sample in family.samples if not sample.labels} == {
        "count": 4, "sum": pytest.approx(70.0111),
    }  # fmt: skip


def test_two_servers_do_not_share_metrics():
    first, second = create_app(FakeEngine()), create_app(FakeEngine())
    post(first, COMPLETIONS, prompt="hi", stream=True)
    assert samples(first)["deltafold_time_to_first_token_seconds_count",] == 1
    assert samples(second)["deltafold_time_to_first_token_seconds_count",] == 0


def test_a_label_takes_no_value_that_a_client_makes_up():
    app = create_app(FakeEngine())
    for path in ("/a", "/b", "/v1/models/x", "/v1/models/y"):
        request(app, "GET", path)
    routes = {key[1] for key in samples(app) if key[0] == "deltafold_http_requests_total"}
    assert routes == {"unmatched", "/v1/models/{model:path}"}
