"""What a Prompt says besides its tokens, whose fault is whose, and the ways around failures."""

import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cachemap import chain_seed
from gateway.errors import ApiError
from gateway.prompt import Prompt
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import NO_PREFILL
from gateway.prompt.reader import Verdict
from gateway.prompt.report import template_report
from gateway.prompt.tokens.agreement import Differences
from replicas.simulated.model import sim_model_dir

from .families import FAMILIES
from .reference import hashes, ids_of, model_dir
from .test_exact import alternate

CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
)
HI = [{"role": "user", "content": "hi"}]


def ask(pipeline, path=CHAT, headers=None, adapters=(), **body) -> Prompt:
    if path in (CHAT, MESSAGES):
        body.setdefault("messages", HI)
    return pipeline.prepare(path, json.dumps(body).encode(), headers, adapters)


def test_fields(sim):
    given = {"model": "m", "stream": True, "max_tokens": 7, "n": 3}
    prompt, bare = ask(sim[0], **given, stream_options={"include_usage": True}, user="u"), ask(sim[0])
    for one, expected in (
        (prompt, given | {"include_usage": True, "session": "u", "adapter": None, "mode": "exact", "note": ""}),
        (bare, {"model": "", "stream": False, "include_usage": False, "max_tokens": None, "n": 1, "session": None}),
    ):
        assert {name: getattr(one, name) for name in expected} == expected and one.path == CHAT
    assert bare.rendered_chars == len("<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>")


@pytest.mark.parametrize(
    "field, path, body, value",
    [
        ("max_tokens", CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, 2),
        ("max_tokens", COMPLETIONS, {"max_tokens": 0, "prompt": "x"}, 0),
        ("max_tokens", RESPONSES, {"max_output_tokens": 5, "max_tokens": 6, "input": "x"}, 5),
        ("max_tokens", MESSAGES, {"max_tokens": 4}, 4),
        # a prompt whose logprobs are wanted is computed whole
        ("reads_cache", CHAT, {}, True),
        ("reads_cache", CHAT, {"logprobs": True, "top_logprobs": 2}, True),
        ("reads_cache", CHAT, {"prompt_logprobs": 0}, False),
        ("reads_cache", CHAT, {"echo": True, "top_logprobs": 1}, False),
        ("reads_cache", CHAT, {"echo": True}, False),
        ("reads_cache", CHAT, {"echo": True, "logprobs": True}, False),
        ("reads_cache", CHAT, {"echo": True, "top_logprobs": None}, False),
        ("reads_cache", CHAT, {"echo": False}, True),
        ("reads_cache", COMPLETIONS, {"prompt": "x", "echo": True}, True),
        ("reads_cache", COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, False),
        ("reads_cache", COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, False),
        ("several", CHAT, {}, False),
        ("several", CHAT, {"n": 2}, True),
        ("several", COMPLETIONS, {"prompt": "x", "n": 1}, False),
        ("several", COMPLETIONS, {"prompt": ["x"]}, False),
        ("several", COMPLETIONS, {"prompt": ["x", "y"]}, True),
        ("several", COMPLETIONS, {"prompt": [[1], [2]]}, True),
        ("several", COMPLETIONS, {"prompt": ["5", 6]}, False),
        ("several", COMPLETIONS, {"prompt": [5.0, 6]}, False),
    ],
)
def test_what_a_body_says_besides_its_prompt(sim, field, path, body, value):
    found = getattr(ask(sim[0], path, **body), field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "headers, body, session",
    [
        ({"x-session-id": "h"}, {"user": "u"}, "h"),
        ({}, {"session_id": "s", "prompt_cache_key": "k"}, "s"),
        (None, {"prompt_cache_key": "k", "user": "u"}, "k"),
        ({"x-session-id": ""}, {"user": "u"}, "u"),
        ({}, {"user": 3}, None),
        ({}, {"safety_identifier": "i", "user": "u"}, "i"),
        ({}, {"metadata": {"user_id": "user_1_account_2_session_3"}, "safety_identifier": "i"}, "user_1_account_2_session_3"),
        ({}, {"metadata": {"session_id": "s", "user_id": "u"}}, "s"),
        ({}, {"metadata": ["user_id"], "user": "u"}, "u"),
        ({}, {"metadata": {"user_id": {"a": 1}}}, None),
        ({}, {"prompt_cache_key": "", "nvext": {"agent_context": {"trajectory_id": "t"}}}, "t"),
        ({"thread-id": "t", "session-id": "s", "x-claude-code-session-id": "c"}, {"prompt_cache_key": "k"}, "c"),
        ({}, {"metadata": {"user_id": "\ud800"}}, "?"),
        ({}, {"user": "\u00fc" * 256}, "\u00fc" * 256),
    ],
)  # fmt: skip
def test_session(sim, headers, body, session):
    assert ask(sim[0], headers=headers, **body).session == session


def test_chains_start_from_model_adapter_salt_and_block_size(sim):
    pipeline, _ = sim
    text = "word " * 100
    starts = {}
    for name, more, adapters in (
        ("base", {}, ()),
        ("lora", {"model": "ad"}, {"ad"}),
        ("other", {"model": "ad"}, ()),
        ("salted", {"cache_salt": "s"}, ()),
    ):
        prompt = ask(pipeline, COMPLETIONS, adapters=adapters, prompt=text, **more)
        seed = chain_seed("m", 16, "ad" if name == "lora" else None, more.get("cache_salt"))
        assert prompt.adapter == ("ad" if name == "lora" else None)
        assert list(prompt.hashes) == hashes(ids_of(prompt), 16, seed)
        starts[name] = prompt.hashes[0]
    assert starts["base"] == starts["other"] and len(set(starts.values())) == 3


def test_lists_of_prompts(sim):
    pipeline, reference = sim
    short, long = "one", "a longer one " * 9
    prompt = ask(pipeline, COMPLETIONS, prompt=[short, long, short])
    assert ids_of(prompt) == reference.ids(long)
    assert prompt.tokens == len(reference.ids(long)) + 2 * len(reference.ids(short))
    assert ids_of(ask(pipeline, COMPLETIONS, prompt=[5, 6, 2**32 - 1])) == [5, 6, 2**32 - 1]
    several = ask(pipeline, COMPLETIONS, prompt=[[1, 2], [3, 4, 5]])
    assert ids_of(several) == [3, 4, 5] and several.tokens == 5
    assert ids_of(ask(pipeline, EMBEDDINGS, input=[short, long])) == reference.ids(long)
    assert ids_of(ask(pipeline, EMBEDDINGS, messages=HI)) == reference.ids(
        reference.render(HI, add_generation_prompt=False)
    )


def test_ids_that_came_with_the_request_are_the_prompt(sim):
    prompt = ask(sim[0], kv_transfer_params={"prompt_token_ids": list(range(40)), "do_remote_prefill": True})
    assert ids_of(prompt) == list(range(40)) and len(prompt.hashes) == 2


@pytest.mark.parametrize("path", sorted(NO_PREFILL))
def test_what_needs_no_prefill_weighs_nothing(sim, path):
    prompt = sim[0].prepare(path, b'{"model": "m", "prompt": "x"}')
    assert (prompt.mode, prompt.tokens, len(prompt.hashes), prompt.model) == ("load", 0, 0, "m")


# Each of these a real vLLM refuses, too (tests/vllm/test_tokens.py).
FAULTS = [
    (CHAT, b"{", None),
    (CHAT, b"[1]", None),
    (CHAT, b"\xff", None),
    (CHAT, b"", None),
    (CHAT, {"model": 1}, "model"),
    (CHAT, {"stream": "perhaps"}, "stream"),
    (CHAT, {"stream": 2}, "stream"),
    (CHAT, {"stream_options": []}, "stream_options"),
    (CHAT, {"max_tokens": "many"}, "max_tokens"),
    (CHAT, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"n": 1.5}, "n"),
    (CHAT, {"n": "x"}, "n"),
    (CHAT, {"cache_salt": 3}, "cache_salt"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": 1}]}, "messages[0].role"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {}}]}]},
        "messages[0].tool_calls",
    ),
    (CHAT, {"tools": []}, "tools"),
    (CHAT, {"tools": [{}]}, "tools[0]"),
    (CHAT, {"chat_template_kwargs": 1}, "chat_template_kwargs"),
    (CHAT, {"add_generation_prompt": None}, "add_generation_prompt"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1.5]]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**32]}, "prompt"),
    (COMPLETIONS, {"prompt": [None]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (EMBEDDINGS, {}, "input"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": [1]}, "input"),
    (RESPONSES, {"input": "x", "instructions": 1}, "instructions"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [1]}, "messages[0]"),
    (MESSAGES, {"system": 4}, "system"),
    (MESSAGES, {"tools": 1}, "tools"),
]


@pytest.mark.parametrize("path, body, param", FAULTS)
def test_the_clients_faults(sim, path, body, param):
    if isinstance(body, dict):
        body = json.dumps({"messages": HI, **body} if path in (CHAT, MESSAGES) else body).encode()
    with pytest.raises(ApiError) as caught:
        sim[0].prepare(path, body)
    error = caught.value
    assert (error.status, error.object("")["error"]["type"], error.param) == (400, "invalid_request_error", param)
    assert error.message


@pytest.mark.parametrize(
    "path, body, note",
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image_url",
        ),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "Unknown role"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "own chat template"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "own chat template"),
        (RESPONSES, {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "item_reference"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "completes itself"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": "s"}]}]}, "image"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "nothing"),
    ],
)
def test_what_cannot_be_known_is_matched_as_text(sim, path, body, note):
    prompt = ask(sim[0], path, **body)
    assert prompt.mode == "text" and prompt.declined and note in prompt.note
    assert not prompt.hashes.known and prompt.token_ids == b""
    assert prompt.tokens > 0  # an estimate, so that its load counts


@pytest.mark.parametrize("own", [{"chat_template": "{{ 1 }}"}, {"messages": [{"role": "wizard", "content": "x"}]}])
def test_what_cannot_be_known_goes_where_its_text_went_before(sim, own):
    """Never by load alone, without any affinity."""
    talk = [*own.get("messages", []), {"role": "user", "content": "word " * 100}]
    first = ask(sim[0], **{**own, "messages": talk})
    second = ask(sim[0], **{**own, "messages": [*talk, {"role": "user", "content": "more " * 100}]})
    assert first.mode == "text" and len(second.hashes) > len(first.hashes) > 5
    assert list(second.hashes[: len(first.hashes)]) == list(first.hashes)


def test_a_failing_tokenizer_fails_nobody(sim, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    pipeline, _ = sim
    monkeypatch.setattr(type(pipeline.tokenizer), "encode", broken)
    prompt = ask(pipeline, COMPLETIONS, prompt="x")
    assert (prompt.mode, prompt.note) == ("text", "RuntimeError: no memory")


def write_model(directory, template):
    directory.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (directory / name).symlink_to(model_dir("sim") / name)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize("template, note", [(None, "no chat template"), ("{% if %}", "not valid Jinja")])
def test_a_model_without_a_template_that_works(tmp_path, template, note):
    pipeline = Pipeline(write_model(tmp_path, template), "m", 16)
    prompt = ask(pipeline)
    assert prompt.mode == "text" and note in prompt.note
    assert ask(pipeline, COMPLETIONS, prompt="still exact").mode == "exact"


TELLS_TIME = """{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}{% if tools %}<｜User｜>It is {{ strftime_now('%H:%M:%S') }}.
{% endif %}<｜Assistant｜>"""


@pytest.mark.parametrize("pattern", ["%H:%M:%S", "%H", "%M", "%S", "%f"])
def test_a_template_that_prints_the_time_is_exact_up_to_it(tmp_path, pattern):
    tells_time = TELLS_TIME.replace("%H:%M:%S", pattern)
    pipeline = Pipeline(write_model(tmp_path, tells_time), "m", 16)
    talk = [{"role": "user", "content": "word " * 100}, {"role": "user", "content": "more " * 100}]
    plain = ask(pipeline, messages=talk)
    assert plain.mode == "exact"
    timed = ask(pipeline, messages=talk, tools=[{"type": "function", "function": {"name": "f"}}])
    assert timed.mode == "partly" and "time of the day" in timed.note and timed.tokens > 200
    assert len(timed.hashes) == timed.hashes.known >= len(plain.hashes) - 1 > 10
    assert list(timed.hashes) == list(plain.hashes[: len(timed.hashes)])
    first = write_model(tmp_path / "first", "{{ strftime_now('%H:%M:%S') }}" + tells_time)
    prompt = ask(Pipeline(first, "m", 16), messages=talk)
    assert (prompt.mode, list(prompt.hashes)) == ("partly", []) and prompt.tokens > 200
    assert template_report(pipeline).prints_time and not template_report(pipeline).refused


EVENING = 1_795_898_520.0  # Saturday 28 November 2026, 20:42 UTC
UNLIKE = Differences(zones=frozenset((0, 52)), days="replica b prints Sunday 29 November", shown=True)
DATED = "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜User｜>It is {{ strftime_now('%d %B') }}.<｜Assistant｜>"


@pytest.mark.parametrize(
    "path, talk", [(CHAT, {}), (MESSAGES, {"max_tokens": 1}), (RESPONSES, {})], ids=["chat", "messages", "responses"]
)
def test_a_date_that_is_not_the_same_for_all_engines_is_exact_up_to_it(path, talk, tmp_path):
    pipeline = Pipeline(write_model(tmp_path, DATED), "m", 16)
    pipeline.clock.now = lambda: EVENING
    said = [{"role": "user", "content": "word " * 200}]
    talk |= {"input" if path == RESPONSES else "messages": said}
    pipeline.differ(UNLIKE._replace(zones=frozenset((52,))))
    sure = ask(pipeline, path, **talk)
    pipeline.differ(UNLIKE)
    unsure = ask(pipeline, path, **talk)
    assert (sure.mode, unsure.mode) == ("exact", "partly") and "b prints Sunday 29 November" in unsure.note
    known = unsure.hashes.known
    assert known >= len(sure.hashes) - 2 > 10 and list(unsure.hashes[:known]) == list(sure.hashes[:known])
    assert len(unsure.hashes) > known and not unsure.token_ids and unsure.declined
    assert ask(pipeline, COMPLETIONS, prompt="no date").mode == "exact"
    pipeline.clock.now = lambda: EVENING + 4 * 3600  # it is the same day for both
    assert ask(pipeline, path, **talk).mode == "exact"
    pipeline.clock.now = lambda: EVENING
    month = Pipeline(write_model(tmp_path / "month", DATED.replace("%d ", "")), "m", 16)
    month.clock.now = pipeline.clock.now
    month.differ(UNLIKE)
    assert ask(month, path, **talk).mode == "exact", "it prints the same on both days"


def test_the_day_of_the_engines_is_printed_by_rules_plans_and_jinja_alike(tmp_path):
    gpt_oss = Pipeline(FAMILIES["gpt-oss"](tmp_path / "gpt-oss"), "m", 16)
    dated = Pipeline(write_model(tmp_path / "dated", DATED), "m", 16)
    for pipeline, printed in ((gpt_oss, "2026-11-{}"), (dated, "It is {} November")):
        pipeline.clock.now = lambda: EVENING
        for zone, day in ((0, 28), (52, 29)):
            pipeline.differ(UNLIKE._replace(zones=frozenset((zone,))))
            for _ in range(40):  # compiled and checked in the meantime
                prompt = ask(pipeline)
                assert prompt.mode == "exact" and printed.format(day) in pipeline.tokenizer.decode(ids_of(prompt))
        pipeline.differ(UNLIKE)
        assert ask(pipeline).mode == "partly" and ask(pipeline, MESSAGES, max_tokens=1).mode == "partly"
    assert dated.renderers["default"].by_plan > 40 and not dated.renderers["default"].compiled.why_not


def test_without_a_tokenizer_prompts_are_matched_as_text():
    pipeline = Pipeline(None, "m", 16)
    first = ask(pipeline, messages=alternate(["the same beginning " * 20], None))
    longer = ask(pipeline, messages=alternate(["the same beginning " * 20, "b", "c" * 200], None))
    other = ask(pipeline, messages=alternate(["another beginning " * 20], None))
    assert first.mode == "text" and first.note and first.tokens == first.rendered_chars // 4
    shared = [a == b for a, b in zip(first.hashes, longer.hashes, strict=False)]
    assert all(shared[:-1]) and len(shared) > 4
    assert first.hashes[0] != other.hashes[0]
    assert ask(pipeline, COMPLETIONS, prompt="x" * 640).tokens == 160
    assert ask(pipeline, COMPLETIONS, prompt=[1] * 640).hashes


def test_plans_that_turn_out_wrong_are_given_up_at_once(load_model, tmp_path, monkeypatch, caplog):
    pipeline = Pipeline(model_dir("sim"), "m", 16)
    renderer = pipeline.renderers["default"]
    for _ in range(6):
        ask(pipeline)
    assert renderer.by_plan
    right = renderer.template.render
    monkeypatch.setattr(renderer.template, "render", lambda *args: right(*args) + " and more")
    with caplog.at_level(logging.ERROR):
        prompt = ask(pipeline)
    assert renderer.compiled.why_not and "off from now on" in caplog.text
    assert ids_of(prompt) == ids_of(ask(pipeline))  # both by Jinja now
    assert prompt.tokens > 3


def test_many_threads_prepare_at_once(sim):
    pipeline = Pipeline(model_dir("sim"), "m", 16, prefix_bytes=200_000)
    _, reference = sim
    talks = [
        alternate([f"{i % 7} words " * 20, f"{i % 3}", f"{i}" * 30][: i % 3 + 1 - i % 2], "system" if i % 2 else None)
        or HI
        for i in range(300)
    ]
    with ThreadPoolExecutor(8) as threads:
        prompts = list(threads.map(lambda talk: ask(pipeline, messages=talk), talks))
    assert pipeline.renderers["default"].by_plan > 100
    for talk, prompt in zip(talks, prompts, strict=True):
        assert prompt.mode == "exact" and ids_of(prompt) == reference.ids(reference.render(talk))


def test_what_cannot_be_written_as_text_is_routed_by_load_where_tokens_are_inexact():
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    pipeline.adopt(Verdict(pipeline.reading.how), True, Differences({"m": "its engine has another tokenizer"}))
    said = b'{"model": "m", "messages": [{"role": "user", "content": "hi", "x": %b%b}]}'
    assert pipeline.prepare("/v1/chat/completions", said % (b"[" * 300, b"]" * 300)).mode == "text"
    prompt = pipeline.prepare("/v1/chat/completions", said % (b"[" * 1000, b"]" * 1000))
    # From Python 3.12 on, JSON of any depth that orjson reads can be written.
    assert (prompt.mode == "load" and prompt.note) if sys.version_info < (3, 12) else prompt.mode == "text"
