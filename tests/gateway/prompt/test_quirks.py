"""What older versions of vLLM make otherwise. That it is so is shown with real ones in tests/vllm/test_tokens.py."""

import json
from dataclasses import replace

import pytest

from gateway.prompt.api.anthropic import Habits
from gateway.prompt.api.conversation import tool_schemas
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.quirks import NEWEST, VersionQuirks
from gateway.prompt.render.template import ChatTemplate
from gateway.prompt.tokens.agreement import Differences
from replicas.engines.sglang import SGLANG
from replicas.engines.vllm.versions import version_quirks

from ...vllm.bodies import call, result, said, system, user
from .families import FAMILIES
from .reference import ids_of, model_dir

CHAT = "/v1/chat/completions"


def quirks(version):
    return VersionQuirks.of(version_quirks(version))


@pytest.fixture(scope="module")
def loaded():
    return Pipeline(model_dir("sim"), "m", 16, max_model_len=100)


@pytest.fixture
def pipeline(loaded):
    """The same one for all tests, of which no engine has shown anything."""
    loaded.differ(Differences())
    return loaded


def text(pipeline, version, **body):
    pipeline.follow(version_quirks(version))
    prompt = pipeline.prepare(CHAT, json.dumps(body).encode())
    assert prompt.mode == "exact", prompt.note
    return pipeline.tokenizer.decode(ids_of(prompt))


@pytest.mark.parametrize(
    "version", [None, "", "0.33.0", "0.33.1rc1.dev4+gabc", "1.0", "v0.33.1", "0.1.dev1+g5d3a", "nightly", "0.0"]
)
def test_the_newest_has_none(version):
    found = quirks(version)
    alike = replace(found, transformers=NEWEST.transformers, chats_known=True, refuses_alike=True)
    assert alike == NEWEST


@pytest.mark.parametrize(
    "version, known",
    [
        *((version, False) for version in ("0.16.0", "0.21.1", "0.27.1")),
        *((version, True) for version in ("0.28.0", "0.32.0", "0.33.2")),
        *((version, None) for version in ("0.34.0", "1.0", "0.1.dev1+g5d3a", "nightly", None)),
    ],
)
def test_versions_that_were_not_read_are_not_called_exact_by_themselves(pipeline, version, known):
    """Older ones never, newer ones and unknown ones once an engine's chats were shown to be the gateway's."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    pipeline.follow(version_quirks(version))
    assert pipeline.prepare(CHAT, body).mode == ("exact" if known else "text")
    pipeline.differ(Differences(shown=True))
    assert pipeline.prepare(CHAT, body).mode == ("text" if known is False else "exact")
    pipeline.differ(Differences())


def test_the_attribution_line(pipeline):
    told = {"messages": [system("x-anthropic-billing-header: 1\nBe brief."), user("hi")]}
    assert "billing" in text(pipeline, "0.31.0", **told)
    assert "billing" not in text(pipeline, "0.32.0", **told) and "Be brief." in text(pipeline, "0.32.0", **told)


@pytest.mark.parametrize(
    "arguments, old, new",
    [
        ("[1]", "[1]", "{}"),
        ("7", "7", "{}"),
        ("null", "{}", "{}"),
        ("", "{}", "{}"),
        ('{"a": 1}', '{"a": 1}', '{"a": 1}'),
    ],
)
def test_arguments(pipeline, arguments, old, new):
    talk = [user("hi"), said("", tool_calls=[call(arguments)])]
    for _ in range(7):  # also by plan
        assert old in text(pipeline, "0.28.0", messages=talk)
    for _ in range(7):
        made = text(pipeline, "0.29.0", messages=talk)
        assert new in made and (old == new or old not in made)


def test_a_template_that_loops_in_a_macro(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(model_dir("sim") / name)
    (tmp_path / "chat_template.jinja").write_text(
        "{% macro show(what) %}{% if what is string %}TEXT{% else %}{% for part in what %}PART{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    )
    pipeline = Pipeline(tmp_path, "m", 16)
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    assert text(pipeline, "0.29.0", **hi) == "TEXT"
    assert text(pipeline, "0.30.0", **hi) == "PART"
    assert text(pipeline, "0.29.0", **hi) == "TEXT"


@pytest.mark.parametrize(
    "kept, loop",
    [
        ("{% set ns = namespace(rest=messages) %}", "ns.rest"),
        ("{% set ns = namespace(rest=[]) %}{% set ns.rest = messages[1:] %}", "ns.rest"),
        ("{% set ns = namespace(all=messages) %}{% set told = ns.all %}", "told"),
    ],
)
def test_a_template_that_keeps_messages_in_a_namespace(kept, loop):
    """Since 0.33 vLLM follows them there; before it gives up where one is set, and gives text."""
    body = f"{{% for m in {loop} %}}{{% for part in m.content %}}{{{{ part.text }}}}{{% endfor %}}{{% endfor %}}"
    old, new = (ChatTemplate(kept + body, {}, quirks(version)).takes_parts for version in ("0.32.0", "0.33.0"))
    assert not old and new
    inline = kept + "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    gives_up = "set ns.rest" in kept
    assert ChatTemplate(inline, {}, quirks("0.32.0")).takes_parts is not gives_up
    assert ChatTemplate(inline, {}, quirks("0.33.0")).takes_parts


def test_what_messages_ask_the_template(pipeline):
    pipeline.follow(version_quirks("0.30.0"))
    assert pipeline._habits == Habits(True, None)
    pipeline.follow(version_quirks("0.31.0"))
    assert pipeline._habits == Habits(False, "low")
    given = Pipeline(model_dir("sim"), "m", 16, chat_template=model_dir("sim") / "chat_template.jinja")
    given.follow(version_quirks("0.30.0"))
    assert given._habits == Habits(False, None)


@pytest.mark.parametrize(
    "version, path, body, kept",
    [
        ("0.28.0", "/v1/completions", {}, 84),
        ("0.32.0", "/v1/completions", {}, 99),
        ("0.28.0", "/v1/completions", {"max_tokens": 1}, 99),
        ("0.32.0", "/v1/completions", {"max_tokens": 0}, 100),
        ("0.28.0", "/v1/embeddings", {}, 100),
        ("0.32.0", "/v1/embeddings", {}, 100),
        ("0.28.0", CHAT, {}, 100),
        ("0.32.0", CHAT, {}, 100),
        ("0.33.0", CHAT, {}, 99),
    ],
)
def test_truncation_to_the_context_length(pipeline, version, path, body, kept):
    pipeline.follow(version_quirks(version))
    ids = list(range(150))
    given = {"input": ids, "prompt": ids, "messages": [{"role": "user", "content": "one two three " * 60}]}
    key = {"/v1/embeddings": "input", CHAT: "messages"}.get(path, "prompt")
    prompt = pipeline.prepare(path, json.dumps({key: given[key], "truncate_prompt_tokens": -1, **body}).encode())
    assert prompt.mode == "exact" and prompt.tokens == kept
    assert path == CHAT or ids_of(prompt) == (ids[:kept] if key == "input" else ids[-kept:])


def test_forwarded_ids_beside_media(pipeline):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    plain = [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]
    sent = {"prompt_token_ids": [1, 2, 3]}
    for version, messages, more, mode, count in (
        ("0.31.0", image, {}, "exact", 3),
        ("0.32.0", image, {}, "text", None),
        ("0.32.0", plain, {}, "exact", 3),
        ("0.31.0", plain, {"echo": True}, "exact", 3),
        ("0.32.0", plain[:1], {"echo": True}, "exact", None),
    ):
        pipeline.follow(version_quirks(version))
        body = {"messages": messages, "kv_transfer_params": sent, **more}
        prompt = pipeline.prepare(CHAT, json.dumps(body).encode())
        assert prompt.mode == mode and (count is None or prompt.tokens == count)
        if mode == "exact" and count is None:
            assert prompt.tokens > 3


def test_results_of_tools_go_on_with_a_turn_of_deepseek_v41_since_0_33(tmp_path):
    """Without tools in the body. Equal to both releases' own encoders in 3,000 random conversations."""
    pipeline = Pipeline(FAMILIES["DeepSeek-V4.1"](tmp_path / "model"), "m", 16)
    asked, answer = user("hi"), result("Sunny.")
    called = said("", reasoning="I look.", tool_calls=[call("{}")])
    assert "I look." not in text(pipeline, "0.32.0", messages=[asked, called, answer])
    assert "I look." in text(pipeline, "0.33.0", messages=[asked, called, answer])
    for version in ("0.32.0", "0.33.0"):  # a user who speaks begins one
        assert "I look." not in text(pipeline, version, messages=[asked, called, answer, asked])


def test_sglang_joins_texts_with_a_space_and_leaves_tools_as_the_client_wrote_them(pipeline):
    """As it was seen to with its own code, in tests/vllm/test_sglang.py."""
    pipeline.follow(SGLANG.version_quirks("0.5.23"))
    pipeline.differ(Differences(shown=True))
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    made = pipeline.prepare(CHAT, json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    assert "One Two" in pipeline.tokenizer.decode(ids_of(made))
    tool = {"type": "function", "function": {"parameters": {}, "name": "f"}}
    assert json.dumps(tool_schemas([tool], as_given=True)[0]) == json.dumps(
        {"type": "function", "function": {"parameters": {}, "name": "f", "description": None}, "defer_loading": None}
    )
