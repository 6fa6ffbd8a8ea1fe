"""For each family that engines read in a way of their own, the ids are those of vLLM, or the gateway declines."""

import json

import pytest

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.render.programs import mistral
from gateway.prompt.report import template_report
from gateway.prompt.tokens.agreement import Answer, Differences
from gateway.prompt.tokens.model import ModelError
from replicas.engines.sglang import Sglang
from replicas.engines.vllm.versions import version_quirks

from .families import FAMILIES, compare, recordings
from .tekken import RESERVED, tekken_json

RECORDINGS = recordings()


@pytest.mark.parametrize("one", RECORDINGS, ids=lambda one: f"{one.family}, {one.version}")
def test_the_ids_are_vllms_or_the_gateway_declines(one, tmp_path):
    found = compare(one.family, FAMILIES[one.family](tmp_path / "model"), one.version, one.answers)
    assert not found.wrong
    assert len(found.equal) >= 0.9 * found.requests >= 200, found.reasons


def test_each_family_was_recorded():
    assert {one.family for one in RECORDINGS} == set(FAMILIES)


@pytest.mark.parametrize(
    "family, version",
    [
        *(("DeepSeek-V4", version) for version in ("0.29.0", "0.30.1", "0.31.0")),
        *(("DeepSeek-V4.1", version) for version in ("0.28.0", "0.31.0")),
    ],
)
def test_rules_that_are_not_known_of_a_version_are_not_guessed(family, version, tmp_path):
    pipeline = Pipeline(FAMILIES[family](tmp_path / "model"), "m", 16)
    pipeline.follow(version_quirks(version))
    prompt = pipeline.prepare("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert prompt.mode == "text" and "this release" in prompt.note
    assert pipeline.prepare("/v1/completions", b'{"prompt": "hi"}').mode == "exact"


def test_what_a_variable_would_do_to_the_engines_tokenizer_is_not_guessed(tmp_path):
    pipeline = Pipeline(FAMILIES["DeepSeek-V3.2"](tmp_path / "model"), "m", 16)
    body = b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"tokenize": true}}'
    assert pipeline.prepare("/v1/chat/completions", body).mode == "text"


def test_tools_results_of_gpt_oss_are_not_guessed_where_their_header_is_not_known(tmp_path):
    pipeline = Pipeline(FAMILIES["gpt-oss"](tmp_path / "model"), "m", 16)
    pipeline.follow(version_quirks("0.30.0"))
    asked = {"role": "user", "content": "hi"}
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        asked,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]
    for messages, mode in (([asked], "exact"), (talk[:2], "exact"), (talk, "text")):
        body = json.dumps({"messages": messages}).encode()
        assert pipeline.prepare("/v1/chat/completions", body).mode == mode


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
def test_gpt_oss_has_its_limit_cut_to_the_context_as_the_engine_does(version, tmp_path):
    """Completions have not: there the engine refuses it."""
    pipeline = Pipeline(FAMILIES["gpt-oss"](tmp_path / "model"), "m", 16, max_model_len=1000)
    pipeline.follow(version_quirks(version))
    talk, asked = [{"role": "user", "content": "hi"}], []
    for path, body in (
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 5000}),
        ("/v1/chat/completions", {"messages": talk, "max_completion_tokens": 5000}),
        ("/v1/messages", {"messages": talk, "max_tokens": 5000}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5000}),
    ):
        asked.append(pipeline.prepare(path, json.dumps(body).encode()))
    assert {(prompt.mode, prompt.max_tokens) for prompt in asked} == {("exact", 1000)}
    with pytest.raises(ApiError, match="max_model_len=1000"):
        pipeline.prepare("/v1/completions", b'{"prompt": "hi", "max_tokens": 5000}')


@pytest.mark.parametrize("family", ["gpt-oss", "DeepSeek-V4.1"])
def test_the_older_name_of_reasoning_counts_where_the_newer_one_is_not_there(family, tmp_path):
    """vLLM renames `reasoning_content` unless there is a `reasoning` that is not null, be it empty."""
    pipeline = Pipeline(FAMILIES[family](tmp_path / "model"), "m", 16)
    pipeline.adopt(pipeline.likeliest(), True, Differences(shown=True))

    def ids(**reasoning):
        called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answer = {"role": "assistant", "content": "", "tool_calls": [called], **reasoning}
        talk = [{"role": "user", "content": "hi"}, answer, {"role": "tool", "tool_call_id": "c1", "content": "x"}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        prompt = pipeline.prepare("/v1/chat/completions", json.dumps({"messages": talk, "tools": tools}).encode())
        assert prompt.mode == "exact", prompt.note
        return prompt.token_ids

    none, some = ids(), ids(reasoning="so")
    assert none != some
    assert ids(reasoning_content="so") == ids(reasoning=None, reasoning_content="so") == some
    assert ids(reasoning="so", reasoning_content="other") == some
    assert ids(reasoning="", reasoning_content="so") == none


def test_the_date_in_the_prompt_of_gpt_oss_is_reported(tmp_path):
    report = template_report(Pipeline(FAMILIES["gpt-oss"](tmp_path / "model"), "m", 16))
    assert report.prints_date and not report.refused and {turn.what for turn in report.turns} >= {"plain", "with tools"}


def test_kimi_is_exact_only_once_an_engine_has_made_the_same_tokens(tmp_path):
    pipeline = Pipeline(FAMILIES["Kimi K2"](tmp_path / "model"), "m", 16)
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    unsure = pipeline.prepare("/v1/chat/completions", body)
    assert unsure.mode == "text" and "code of its own" in unsure.note
    answers = [
        Answer(text, special, memoryview(pipeline.tokenizer.encode(text, special)).cast("I").tolist())
        for text in pipeline.fixed_texts()
        for special in (False, True)
    ]
    pipeline.adopt(pipeline.judge(answers), True)
    assert pipeline.prepare("/v1/chat/completions", body).mode == "exact"
    answers[3] = answers[3]._replace(ids=[1, 2, 3])
    assert "other tokens" in pipeline.judge(answers).differs


@pytest.mark.parametrize(
    "text, mode",
    [
        ("x" * 24_999, "exact"),
        ("x" * 25_000, "text"),
        (" " * 30_000, "text"),
        ("x " * 40_000, "exact"),
        ("x " * 200_000, "text"),
    ],
)
def test_what_kimis_program_encodes_in_parts_is_declined(text, mode, tmp_path):
    pipeline = Pipeline(FAMILIES["Kimi K2"](tmp_path / "model"), "m", 16)
    pipeline.adopt(pipeline.likeliest(), True, Differences(shown=True))
    assert pipeline.prepare("/v1/completions", json.dumps({"prompt": text}).encode()).mode == mode


@pytest.mark.parametrize("program", ["", "pat_str = 3", "pat_str = make()", "this is no Python"])
def test_a_program_whose_pattern_cannot_be_told_is_not_guessed(program, tmp_path):
    folder = FAMILIES["Kimi K2"](tmp_path / "model")
    (folder / "tokenization_kimi.py").write_text(program)
    pipeline = Pipeline(folder, "m", 16)
    prompt = pipeline.prepare("/v1/completions", b'{"prompt": "hi"}')
    assert prompt.mode == "text" and "no tokenizer.json" in prompt.note


@pytest.mark.parametrize("content", ["no base64 at all", "YQ== one", "YQ=="])
def test_a_vocabulary_that_is_none_is_said(content, tmp_path):
    folder = FAMILIES["Kimi K2"](tmp_path / "model")
    (folder / "tiktoken.model").write_text(content)
    with pytest.raises(ModelError, match=r"can't read tiktoken\.model"):
        Pipeline(folder, "m", 16)


HI = b'{"messages": [{"role": "user", "content": "hi"}]}'


def ids_of(pipeline: Pipeline, text: str) -> list[int]:
    prompt = pipeline.prepare("/v1/completions", json.dumps({"prompt": text}).encode())
    assert prompt.mode == "exact", prompt.note
    return memoryview(prompt.token_ids).cast("I").tolist()


def test_no_text_spells_a_special_token_of_mistrals_own_format(tmp_path):
    pipeline = Pipeline(FAMILIES["Mistral (tekken v7)"](tmp_path / "model"), "m", 16)
    assert pipeline.prepare("/v1/chat/completions", HI).mode == "text"
    pipeline.adopt(pipeline.likeliest(), True, Differences(shown=True))
    assert pipeline.prepare("/v1/chat/completions", HI).mode == "exact"
    begin, *rest = ids_of(pipeline, "[INST]")
    assert begin == 1 and min(rest) >= RESERVED
    for name in (mistral.spelled("[INST]"), f"a {mistral.spelled('</s>')} b"):
        for path, body in (
            ("/v1/completions", {"prompt": name}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": name}]}),
        ):
            assert pipeline.prepare(path, json.dumps(body).encode()).mode == "text"


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["config"].update(version="v99"),
        lambda told: told.pop("config"),
        lambda told: told.pop("special_tokens"),
        lambda told: told["special_tokens"].pop(3),
    ],
)
def test_a_tekken_json_of_another_form_is_not_guessed(change, tmp_path):
    folder = FAMILIES["Mistral (tekken v13)"](tmp_path / "model")
    told = tekken_json(13)
    change(told)
    (folder / "tekken.json").write_text(json.dumps(told))
    prompt = Pipeline(folder, "m", 16).prepare("/v1/chat/completions", HI)
    assert prompt.mode == "text" and "can't read tekken.json" in prompt.note


def test_a_tekken_json_whose_words_cannot_be_read_is_said(tmp_path):
    folder = FAMILIES["Mistral (tekken v13)"](tmp_path / "model")
    told = tekken_json(13)
    del told["vocab"][400]["token_bytes"]
    (folder / "tekken.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match="token_bytes"):
        Pipeline(folder, "m", 16)


@pytest.mark.parametrize("effort, mode", [(None, "exact"), ("none", "exact"), ("high", "exact"), ("low", "text")])
def test_efforts_are_those_that_a_tekken_json_lists(effort, mode, tmp_path):
    pipeline = Pipeline(FAMILIES["Mistral (tekken v15)"](tmp_path / "model"), "m", 16)
    pipeline.adopt(pipeline.likeliest(), True, Differences(shown=True))
    body = {"messages": [{"role": "user", "content": "hi"}], **({"reasoning_effort": effort} if effort else {})}
    assert pipeline.prepare("/v1/chat/completions", json.dumps(body).encode()).mode == mode


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "DeepSeek-V4", "gpt-oss"])
def test_an_engine_whose_rules_are_not_known_is_not_taken_for_one_whose_are(name, tmp_path):
    pipeline = Pipeline(FAMILIES[name](tmp_path / "model"), "m", 16)
    pipeline.follow(Sglang().version_quirks("0.5.14"))
    prompt = pipeline.prepare("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert prompt.mode == "text" and "nothing has shown" in prompt.note
    assert pipeline.prepare("/v1/completions", b'{"prompt": "hi"}').mode == "exact"
