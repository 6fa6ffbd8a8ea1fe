"""JSON and fields that are looser than the standard, and that vLLM takes."""

import json

import pytest

from gateway.errors import ApiError
from gateway.prompt.api.conversation import tool_schemas
from gateway.prompt.api.openai import boolean, count, integer, packed, parse, prompts_of
from gateway.prompt.pipeline import Pipeline

from ..reference import ids_of, model_dir

CHAT = "/v1/chat/completions"
HI = '{"messages": [{"role": "user", "content": "hi"}], '


@pytest.mark.parametrize(
    "body",
    [
        (HI + '"x": NaN}').encode(),
        (HI + '"x": -Infinity}').encode(),
        (HI + '"x": 1e999}').encode(),
        (HI + '"user": "\\ud83d"}').encode(),
        b"\xef\xbb\xbf" + (HI + '"x": 1}').encode(),
        (HI + '"x": 1}').encode("utf-16"),
        b'{"messages": [{"role": "user", "content": "hi \\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "hi \xed\xa0\xbd"}]}',
    ],
)
def test_json_that_only_python_reads_is_left_to_the_engine(sim, body):
    prompt = sim[0].prepare(CHAT, body)
    assert prompt.mode == "text" and "only Python reads" in prompt.note and prompt.tokens > 0
    assert (prompt.session or "").encode() is not None  # whatever leaves the room can be encoded


@pytest.mark.parametrize(
    "body", [b"\xff{", b'{"a": 1,}', b"{'a': 1}", b"NaN", b"[" * 100_000, b'{"a": "\n"}', b'{"a": "\xff"}', b""]
)
def test_what_python_cannot_read_either(body):
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400


def test_booleans():
    assert [boolean(given, "k") for given in (True, "true", "YES", 1, 1.0)] == [True] * 5
    assert [boolean(given, "k") for given in (False, "False", "off", 0)] == [False] * 4


@pytest.mark.parametrize("given", [None, 2, "", "maybe", [], float("nan"), -1])
def test_no_booleans(given):
    with pytest.raises(ApiError, match="'k' must be true or false"):
        boolean(given, "k")


def test_integers():
    assert [integer(given) for given in (3, "3", " +3 ", "3.0", 3.0)] == [3] * 5
    assert [integer(given) for given in ("1_000", True, "-1")] == [1000, 1, -1]
    assert [integer(given) for given in (2**64 - 1, -(2**63))] == [2**64 - 1, -(2**63)]
    beyond = (2**64, -(2**63) - 1, 2.0**64, str(2**64), 1e308, "9" * 5000, float("inf"))
    for given in (*beyond, 3.5, "3.5", "x", "", None, [], float("nan"), "\u0663"):
        assert integer(given) is None, given


def test_counts():
    assert (count(None, "k"), count(0, "k"), count("16", "k")) == (None, 0, 16)
    for given in (-1, "-1", 1.5, "many"):
        with pytest.raises(ApiError, match="at least 0"):
            count(given, "k")


HUGE = [
    "9" * 4300,
    "9" * 4301,
    '"%s"' % ("9" * 5000),
    '"%s"' % ("9" * 30),
    "1e308",
    "1" + "0" * 25,
    "-" + "9" * 25,
    "1e400",
]
FIELDS = {
    CHAT: "max_tokens max_completion_tokens n priority seed top_logprobs min_tokens truncate_prompt_tokens top_k stream "
    "thinking_token_budget",
    "/v1/completions": "best_of logprobs prompt_logprobs",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/v1/embeddings": "dimensions",
    "/tokenize": "max_tokens",
}


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, names in FIELDS.items() for field in names.split()]
)
def test_numbers_that_no_integer_holds_are_the_clients_fault(sim, path, field):
    for number in HUGE:
        said = '"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"'
        with pytest.raises(ApiError) as caught:
            sim[0].prepare(path, f'{{{said}, "{field}": {number}}}'.encode())
        told = "64 bits" in caught.value.message or "not valid JSON" in caught.value.message or field == "stream"
        assert caught.value.status == 400 and told


@pytest.mark.parametrize("field", ["prompt", "input"])
@pytest.mark.parametrize("number", ['"%s"' % ("9" * 5000), "1e308", "9" * 30, '"%s"' % ("9" * 30)])
def test_so_are_token_ids(sim, field, number):
    with pytest.raises(ApiError) as caught:
        sim[0].prepare(
            "/v1/completions" if field == "prompt" else "/v1/embeddings", ('{"%s": [1, %s]}' % (field, number)).encode()
        )
    assert caught.value.status == 400


def test_ids_as_pydantic_reads_them():
    assert prompts_of([True, 2.0, "3"][:2], "prompt") == [packed([1, 2], "prompt")]
    assert prompts_of([[1.0], [2]], "prompt") == [packed([1], "prompt"), packed([2], "prompt")]
    assert prompts_of(["1", "2"], "prompt") == ["1", "2"]
    assert prompts_of(["5", 6], "prompt") == prompts_of([5.0, "6"], "input") == [packed([5, 6], "prompt")]
    assert prompts_of([["5", 6], [7]], "prompt") == [packed([5, 6], "prompt"), packed([7], "prompt")]
    for wrong in ([1, None], ["x", 6], ["", 6], ["5", 6.5], [["5"], "6"], ["a", ["b"]], ["5", -6], [5, [6]]):
        with pytest.raises(ApiError):
            prompts_of(wrong, "prompt")


def test_loose_fields_change_the_prompt_as_strict_ones_do(sim):
    pipeline, _ = sim
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    strict = pipeline.prepare(
        CHAT, json.dumps({**talk, "add_generation_prompt": False, "stream": True, "max_tokens": 5}).encode()
    )
    loose = pipeline.prepare(
        CHAT, json.dumps({**talk, "add_generation_prompt": "no", "stream": "true", "max_tokens": "5"}).encode()
    )
    assert ids_of(loose) == ids_of(strict) != ids_of(pipeline.prepare(CHAT, json.dumps(talk).encode()))
    assert (loose.stream, loose.max_tokens) == (strict.stream, strict.max_tokens) == (True, 5)


NUMBERS = """
18446744073709551615 18446744073709551616 -9223372036854775809 123456789012345678901234567890 1e16 1.5e-30 1.79e308
-1.7976931348623157e+308 9223372036854775808.0 1E19
""".split()
# Wherever a template may print one: in tools, variables, a call's arguments (as an object and as a text), and what else
# reaches it.
PLACES = {
    "tools": (
        CHAT,
        '"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": %s}}}]',
    ),
    "variables": (CHAT, '"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"limit": %s}'),
    "arguments": (
        CHAT,
        '"messages": [{"role": "assistant", "content": "", "tool_calls": '
        '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [%s]}}}]}]',
    ),
    "arguments as text": (
        CHAT,
        '"messages": [{"role": "assistant", "content": "", "tool_calls": '
        '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": [%s]}"}}]}]',
    ),
    "a part": (CHAT, '"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "weight": %s}]}]'),
    "Messages": (
        "/v1/messages",
        '"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": '
        '[{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [%s]}}]}]',
    ),
}


@pytest.fixture(scope="module")
def printing(tmp_path_factory):
    """A model whose template prints all that it gets, in one way and another."""
    template = tmp_path_factory.mktemp("templates") / "all.jinja"
    template.write_text(
        "{% for m in messages %}<｜User｜>{{ m | tojson }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
        "{% endfor %}{% for p in m.content %}{{ p.weight }}{% endfor %}{% endfor %}{{ tools | tojson }}{{ tools }}{{ limit }}"
    )
    return Pipeline(model_dir("sim"), "m", 16, chat_template=template)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", PLACES)
def test_numbers_of_any_size_are_printed_as_python_prints_them(printing, place, number):
    """The engine reads JSON with Python, where an integer has as many digits as it likes. Ten times: by Jinja, then by
    a plan."""
    path, body = PLACES[place]
    raw = f"{{{body % number}}}"
    said = json.loads(raw)
    read = json.dumps(json.loads(number))
    for _ in range(10):
        prompt = printing.prepare(path, raw.encode())
        assert prompt.mode == "exact", prompt.note
        text = printing.tokenizer.decode(ids_of(prompt))
        assert read in text and (
            place != "tools" or text.endswith(f"{json.dumps(tools := tool_schemas(said['tools']))}{tools}")
        )


OTHERS = {  # fields of other APIs, which vLLM passes over at this path whatever they hold (0.32 asked)
    "/v1/completions": {"max_completion_tokens", "dimensions"},
    "/v1/responses": {"max_completion_tokens", "max_tokens", "n", "stream_options", "logprobs", "best_of"},
    "/v1/messages": {
        "max_completion_tokens", "max_output_tokens", "n", "stream_options", "truncate_prompt_tokens", "priority", "logprobs", "prompt_logprobs", "echo",
    },
    "/v1/embeddings": {"max_tokens", "max_completion_tokens", "n", "stream_options", "best_of", "top_k"},
}  # fmt: skip
CASES = [(path, field) for path, fields in OTHERS.items() for field in sorted(fields)]


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field_that_the_api_does_not_have_changes_nothing(sim, path, field):
    text = "all the world is a stage " * 20
    said = {
        "/v1/completions": {"prompt": text, "max_tokens": 7},
        "/v1/responses": {"input": text, "max_output_tokens": 7},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 7},
        "/v1/embeddings": {"input": text},
    }[path]
    alone = sim[0].prepare(path, json.dumps(said).encode())
    for value in (3, 2**40, 10**30, -1, "x", [], {}, True):
        prompt = sim[0].prepare(path, json.dumps({**said, field: value}).encode())
        assert prompt == alone, value
