"""Which paths of an engine a client reaches: real sockets, an engine that would answer everything."""

import json

import pytest

from gateway.prompt.prompt import unread
from gateway.proxy.paths import MODELS, refusal
from gateway.proxy.placement.placing import demand_of
from gateway.settings import ConfigError, load

from .replies import BODY, answers, post
from .stack import stack

# The operator's verbs of vLLM 0.32 (in development mode, too) and of the simulated engine, and other spellings of them.
OPERATORS = """
    /sleep /wake_up /is_sleeping /pause /resume /is_paused /abort_requests /inference/v1/abort_requests
    /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /collective_rpc /server_info /metrics /load
    /v1/load_lora_adapter /v1/unload_lora_adapter /start_profile /stop_profile /scale_elastic_ep
    /is_scaling_elastic_ep /update_weights /init_weight_transfer_engine /kv_event_sources /openapi.json /docs
    /faults / //sleep /sleep/ /%73leep /v1/../sleep /v1/chat/completions/../../../sleep /v1/responses/..
    /v1/responses/../cancel /v1/responses/../../sleep /v1/responses/%2e%2e/sleep /v1/responses/x%2f..%2f..%2fsleep
    /v1/responses/resp_1/cancel/x /v1/models/../../sleep /;/sleep /v1/chat/completions;/../sleep /SLEEP
    http://engine/sleep http://engine:8000//sleep /sleep?/v1/chat/completions /sleep#/v1/models
""".split()
# What vLLM documents for clients.
CLIENTS = """
    /v1/chat/completions/batch /v1/chat/completions/render /v1/chat/completions/derender /v1/completions/render
    /v1/completions/derender /v1/messages/count_tokens /v1/messages/render /v1/responses/render
    /v1/responses/resp_0a-b /v1/responses/resp_0a-b/cancel /v1/audio/transcriptions /v1/audio/translations /version
    /tokenizer_info /v2/embed /cohere/v2/chat /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
    /generative_scoring /v1/systemone /inference/v1/generate /ping /invocations /v1/chat/completions /v1/completions
    /v1/responses /v1/messages /v1/embeddings /tokenize /detokenize /version?x=/sleep http://gateway:8080/v1/rerank
""".split()


async def test_an_operators_verb_reaches_no_engine_and_the_refusal_says_where_it_goes():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        for path in OPERATORS:
            for method in (b"POST", b"GET", b"OPTIONS"):
                status, _, body = await talk.ask(post(b"{}", path=path.encode()).replace(b"POST", method, 1))
                assert status == 404, path
                told = json.loads(body)["error"]
                assert told["code"] == "path_not_allowed"
                if path == "/metrics":
                    assert "--admin-port" in told["message"]
                elif not any(odd in path for odd in ("..", "%", ";", "//", "#")):
                    assert "--allow-path" in told["message"] and "/replicas/ID/engine" in told["message"]
                elif ".." in path:
                    assert "--allow-path" not in told["message"], "nobody should allow that"
        _, _, body = await talk.ask(post(b"{}", path=b"/v1/messages/batches"))
        assert json.loads(body)["error"]["type"] == "not_found_error", "Anthropic's format below /v1/messages"
        assert seen == [] and s.idle()
        assert s.metrics.requests.total(status="4xx") == 3 * len(OPERATORS) + 1


@pytest.mark.parametrize(
    ("path", "bare"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/messages/?beta=true", "/v1/messages?beta=true"),
        ("/v1/models//", "/v1/models"),
        ("/v1/models/org/a/", "/v1/models/org/a"),
        ("/v1/responses/resp_1/", "/v1/responses/resp_1"),
        ("/health/", "/health"),
        ("http://gateway:8080/v1/rerank/", "/v1/rerank"),
        ("/mine/", "/mine"),
    ],
)
async def test_a_trailing_slash_leads_to_the_path_without_as_with_vllm(path, bare):
    seen, ended = [], []

    def note(exchange, outcome, usage):
        ended.append((exchange.id, exchange.answered_with))

    async with stack(answers(seen=seen), allow_paths=("/mine", "/theirs/*"), on_end=[note]) as s:
        talk = await s.talk()
        for method in (b"POST", b"GET"):
            request = post(BODY, path.encode(), b"X-Request-Id: mine\r\n").replace(b"POST", method, 1)
            status, headers, body = await talk.ask(request)
            assert (status, headers["location"], body) == (307, bare, b"")
        assert not seen
        assert dict(s.metrics.requests.values) == {("other", "3xx"): 2} and ended == [(b"mine", 307)] * 2
        for unknown in (b"/none/", b"//other.example/", b"/"):
            assert (await talk.ask(post(BODY, path=unknown)))[0] == 404
        await talk.say(post(BODY, path=b"/theirs/a/"))  # of what stands behind the beginning, nothing is known here
        assert (await talk.response())[0] == 200 and len(seen) == 1


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/message", "/v1/messages"),
    ],
)
async def test_a_slip_in_a_path_is_told_what_was_meant_and_not_to_be_opened(slip, meant):
    async with stack(answers()) as s:
        status, _, body = await s.ask(post(b"{}", path=slip.encode()))
        said = json.loads(body)["error"]["message"]
        assert status == 404 and said.endswith(f"did you mean {meant}?") and "--allow-path" not in said


async def test_all_that_vllm_has_for_clients_reaches_the_engine():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        for path in CLIENTS:
            assert (await talk.ask(post(BODY, path=path.encode())))[0] == 200, path
        assert len(seen) == len(CLIENTS)


OPENED = "/v1/images/generations /v1/images/a/b.png /v1/images/ /generate /load".split()
NOT_OPENED = r"""
    /v1/images /v1/images/../sleep /v1/images/a/../../sleep /v1/images/%2e%2e/sleep /v1/images//sleep
    /v1/images/a\..\sleep /v1/images/./sleep /generate/x /sleep
""".split()


async def test_further_paths_are_the_operators_to_allow():
    seen = []
    async with stack(answers(seen=seen), allow_paths=("/v1/images/*", "/generate", "/load")) as s:
        talk = await s.talk()
        for expected, paths in {200: OPENED, 404: NOT_OPENED}.items():
            for path in paths:
                assert (await talk.ask(post(BODY, path=path.encode())))[0] == expected, path
    assert len(seen) == len(OPENED)


async def test_everything_can_be_allowed():
    async with stack(answers(), allow_paths=("/*",)) as s:
        talk = await s.talk()
        for path in (b"/sleep", b"/v1/load_lora_adapter", b"/"):
            assert (await talk.ask(post(BODY, path=path)))[0] == 200


def test_allowed_paths_are_settings():
    assert load({"allow_path": "/a,/b/*"}, {}).settings.allow_path == ("/a", "/b/*")
    assert load({}, {"HITHERTO_ALLOW_PATH": "/a /b"}).settings.allow_path == ("/a", "/b")


@pytest.mark.parametrize("path", ["sleep", "/a*", "/*/b", "/a?b", "/%61", "/a#b"])
def test_a_path_that_never_matches_is_refused_at_once(path):
    with pytest.raises(ConfigError, match="flag --allow-path: .* is not a path like"):
        load({"allow_path": path}, {})


@pytest.mark.parametrize("path", ["/v1/../sleep", "/./sleep", "/v1/..", "/../*"])
def test_a_path_with_a_part_of_dots_is_refused_at_once(path):
    with pytest.raises(ConfigError, match="flag --allow-path: .* has a part of dots"):
        load({"allow_path": path}, {})
    assert load({"allow_path": "/v1/a..b/.hidden"}, {}).settings.allow_path == ("/v1/a..b/.hidden",)


@pytest.mark.parametrize(
    "path", ["/metrics", "/replicas", "/replicas/gpu1:8000/drain", "/explain", "/status", "/recent"]
)
def test_what_the_admin_side_has_is_named_there_and_not_at_an_engine(path):
    said = refusal(path, False)
    assert path in said and "--admin-port" in said and "/engine/" not in said and "--allow-path" not in said
    assert "admin" not in refusal(path, True)


def test_a_path_of_an_engine_that_only_begins_like_one_of_the_admin_side():
    assert "/replicas/ID/engine/metrics2" in refusal("/metrics2", False)


def test_what_writes_no_tokens_is_asked_for_none():
    """By path alone, of prompts that are read and that are not; what an operator opened may write."""
    for path in ("/v1/embeddings", "/v1/rerank", "/score", "/pooling", "/classify", "/v2/embed", "/tokenize", MODELS):
        assert not demand_of(unread(path, "sim")).writes, path
    for path in "/v1/chat/completions /v1/audio/transcriptions /inference/v1/generate /v1/images/generations".split():
        assert demand_of(unread(path, "sim")).writes, path
