"""What the gateway declines of families that engines read in a way of their own. tests/bench/test_exactness_page.py
holds the ids that it makes of them to vLLM's."""

import functools
import json
import shutil

import pytest

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.render.programs import mistral
from gateway.prompt.report import template_report
from gateway.prompt.tokens.agreement import Answer, Differences
from gateway.prompt.tokens.model import ModelError
from replicas.engines.sglang import Sglang
from replicas.engines.vllm.versions import version_quirks

from ...vllm.bodies import call, result, said, user
from .families import FAMILIES, recordings
from .tekken import RESERVED, tekken_json

HI = b'{"messages": [{"role": "user", "content": "hi"}]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`folder(family)` has the files of that family, which are written once: a test that changes them takes a copy."""
    return functools.cache(lambda family: FAMILIES[family](tmp_path_factory.mktemp("family") / "model"))


@pytest.fixture
def copied(folder, tmp_path):
    return lambda family: shutil.copytree(folder(family), tmp_path / "model")


@pytest.fixture(scope="module")
def read(folder):
    """`read(family)` reads the files of a family once: the vocabulary of gpt-oss takes five seconds of CPU."""
    return functools.cache(lambda family: Pipeline(folder(family), "m", 16))


@pytest.fixture
def pipeline_of(read):
    """`pipeline_of(family)` has been compared with no engine, and follows the newest one."""
    used = []

    def get(family: str) -> Pipeline:
        used.append(read(family))
        return used[-1]

    yield get
    for pipeline in used:
        pipeline.max_model_len = None
        pipeline.adopt(pipeline.likeliest(), False, Differences())
        pipeline.follow({})


def as_compared(pipeline: Pipeline) -> Pipeline:
    """After an engine made the same tokens of the fixed texts and chats."""
    pipeline.adopt(pipeline.likeliest(), True, Differences(shown=True))
    return pipeline


def test_each_family_was_recorded():
    assert {one.family for one in recordings()} == set(FAMILIES)


@pytest.mark.parametrize(
    "family, versions",
    [("DeepSeek-V4", ("0.29.0", "0.30.1", "0.31.0")), ("DeepSeek-V4.1", ("0.28.0", "0.31.0"))],
)
def test_rules_that_are_not_known_of_a_version_are_not_guessed(family, versions, pipeline_of):
    pipeline = pipeline_of(family)
    for version in versions:
        pipeline.follow(version_quirks(version))
        prompt = pipeline.prepare("/v1/chat/completions", HI)
        assert prompt.mode == "text" and "this release" in prompt.note, version
        assert pipeline.prepare("/v1/completions", b'{"prompt": "hi"}').mode == "exact", version


def test_what_a_variable_would_do_to_the_engines_tokenizer_is_not_guessed(pipeline_of):
    pipeline = pipeline_of("DeepSeek-V3.2")
    body = b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"tokenize": true}}'
    assert pipeline.prepare("/v1/chat/completions", body).mode == "text"


def test_tools_results_of_gpt_oss_are_not_guessed_where_their_header_is_not_known(pipeline_of):
    pipeline = pipeline_of("gpt-oss")
    pipeline.follow(version_quirks("0.30.0"))
    talk = [user("hi"), said(None, tool_calls=[call("{}")]), result("x")]
    for messages, mode in ((talk[:1], "exact"), (talk[:2], "exact"), (talk, "text")):
        body = json.dumps({"messages": messages}).encode()
        assert pipeline.prepare("/v1/chat/completions", body).mode == mode


def test_gpt_oss_has_its_limit_cut_to_the_context_as_the_engine_does(pipeline_of):
    """Completions have not: there the engine refuses it."""
    pipeline = pipeline_of("gpt-oss")
    pipeline.max_model_len = 1000
    talk = [user("hi")]
    for version in ("0.28.0", "0.32.0"):
        pipeline.follow(version_quirks(version))
        asked = [
            pipeline.prepare(path, json.dumps(body).encode())
            for path, body in (
                ("/v1/chat/completions", {"messages": talk, "max_tokens": 5000}),
                ("/v1/chat/completions", {"messages": talk, "max_completion_tokens": 5000}),
                ("/v1/messages", {"messages": talk, "max_tokens": 5000}),
                ("/v1/responses", {"input": "hi", "max_output_tokens": 5000}),
            )
        ]
        assert {(prompt.mode, prompt.max_tokens) for prompt in asked} == {("exact", 1000)}, version
        with pytest.raises(ApiError, match="max_model_len=1000"):
            pipeline.prepare("/v1/completions", b'{"prompt": "hi", "max_tokens": 5000}')


@pytest.mark.parametrize("family", ["gpt-oss", "DeepSeek-V4.1"])
def test_the_older_name_of_reasoning_counts_where_the_newer_one_is_not_there(family, pipeline_of):
    """vLLM renames `reasoning_content` unless there is a `reasoning` that is not null, be it empty."""
    pipeline = as_compared(pipeline_of(family))

    def ids(**reasoning):
        talk = [user("hi"), said("", tool_calls=[call("{}", "f")], **reasoning), result("x")]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        prompt = pipeline.prepare("/v1/chat/completions", json.dumps({"messages": talk, "tools": tools}).encode())
        assert prompt.mode == "exact", prompt.note
        return prompt.token_ids

    none, some = ids(), ids(reasoning="so")
    assert none != some
    assert ids(reasoning_content="so") == ids(reasoning=None, reasoning_content="so") == some
    assert ids(reasoning="so", reasoning_content="other") == some
    assert ids(reasoning="", reasoning_content="so") == none


def test_the_date_in_the_prompt_of_gpt_oss_is_reported(pipeline_of):
    report = template_report(pipeline_of("gpt-oss"))
    assert report.prints_date and not report.refused and {turn.what for turn in report.turns} >= {"plain", "with tools"}


def test_kimi_is_exact_only_once_an_engine_has_made_the_same_tokens(pipeline_of):
    pipeline = pipeline_of("Kimi K2")
    unsure = pipeline.prepare("/v1/chat/completions", HI)
    assert unsure.mode == "text" and "code of its own" in unsure.note
    answers = [
        Answer(text, special, memoryview(pipeline.tokenizer.encode(text, special)).cast("I").tolist())
        for text in pipeline.fixed_texts()
        for special in (False, True)
    ]
    pipeline.adopt(pipeline.judge(answers), True)
    assert pipeline.prepare("/v1/chat/completions", HI).mode == "exact"
    answers[3] = answers[3]._replace(ids=[1, 2, 3])
    assert "other tokens" in pipeline.judge(answers).differs


def test_what_kimis_program_encodes_in_parts_is_declined(pipeline_of):
    pipeline = as_compared(pipeline_of("Kimi K2"))
    exact, text = (("x", 24_999), ("x ", 40_000)), (("x", 25_000), (" ", 30_000), ("x ", 200_000))
    for word, times in exact + text:
        body = json.dumps({"prompt": word * times}).encode()
        mode = "exact" if (word, times) in exact else "text"
        assert pipeline.prepare("/v1/completions", body).mode == mode, (word, times)


@pytest.mark.parametrize("program", ["", "pat_str = 3", "pat_str = make()", "this is no Python"])
def test_a_program_whose_pattern_cannot_be_told_is_not_guessed(program, copied):
    model = copied("Kimi K2")
    (model / "tokenization_kimi.py").write_text(program)
    pipeline = Pipeline(model, "m", 16)
    prompt = pipeline.prepare("/v1/completions", b'{"prompt": "hi"}')
    assert prompt.mode == "text" and "no tokenizer.json" in prompt.note


@pytest.mark.parametrize("content", ["no base64 at all", "YQ== one", "YQ=="])
def test_a_vocabulary_that_is_none_is_said(content, copied):
    model = copied("Kimi K2")
    (model / "tiktoken.model").write_text(content)
    with pytest.raises(ModelError, match=r"can't use \S+/tiktoken\.model: "):
        Pipeline(model, "m", 16)


def ids_of(pipeline: Pipeline, text: str) -> list[int]:
    prompt = pipeline.prepare("/v1/completions", json.dumps({"prompt": text}).encode())
    assert prompt.mode == "exact", prompt.note
    return memoryview(prompt.token_ids).cast("I").tolist()


def test_no_text_spells_a_special_token_of_mistrals_own_format(pipeline_of):
    pipeline = pipeline_of("Mistral (tekken v7)")
    assert pipeline.prepare("/v1/chat/completions", HI).mode == "text"
    as_compared(pipeline)
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
def test_a_tekken_json_of_another_form_is_not_guessed(change, copied):
    model = copied("Mistral (tekken v13)")
    told = tekken_json(13)
    change(told)
    (model / "tekken.json").write_text(json.dumps(told))
    prompt = Pipeline(model, "m", 16).prepare("/v1/chat/completions", HI)
    assert prompt.mode == "text" and "can't read tekken.json" in prompt.note


def test_a_tekken_json_whose_words_cannot_be_read_is_said(copied):
    model = copied("Mistral (tekken v13)")
    told = tekken_json(13)
    del told["vocab"][400]["token_bytes"]
    (model / "tekken.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match="token_bytes"):
        Pipeline(model, "m", 16)


def test_efforts_are_those_that_a_tekken_json_lists(pipeline_of):
    pipeline = as_compared(pipeline_of("Mistral (tekken v15)"))
    for effort, mode in ((None, "exact"), ("none", "exact"), ("high", "exact"), ("low", "text")):
        body = {**json.loads(HI), **({"reasoning_effort": effort} if effort else {})}
        assert pipeline.prepare("/v1/chat/completions", json.dumps(body).encode()).mode == mode, effort


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "DeepSeek-V4", "gpt-oss"])
def test_an_engine_whose_rules_are_not_known_is_not_taken_for_one_whose_are(name, pipeline_of):
    pipeline = pipeline_of(name)
    pipeline.follow(Sglang().version_quirks("0.5.14"))
    prompt = pipeline.prepare("/v1/chat/completions", HI)
    assert prompt.mode == "text" and "nothing has shown" in prompt.note
    assert pipeline.prepare("/v1/completions", b'{"prompt": "hi"}').mode == "exact"
