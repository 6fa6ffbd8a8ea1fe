"""Requests to token ids: as vLLM does it, and with HF `tokenizers` as the judge of the ids."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.simulated import requests
from replicas.simulated.tokens import RequestError, Tokens

TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weigh", "arguments": '{"what": "fish"}'}}


@pytest.fixture(scope="module")
def reference(model_dir):
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def build(folder, template=None) -> Tokens:
    """A model with another template and a tokenizer of a kind that only the reference can load."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": template})
    )
    return Tokens(folder)


def test_a_tokenizer_that_fastokens_cannot_load_is_loaded_by_the_reference(tmp_path):
    tokens = build(tmp_path, "{{ messages[0].content }}")
    assert tokens.chat({"messages": [{"role": "user", "content": "a b a"}]}) == [1, 0, 1] and tokens.eos_id == 2


def test_a_conversation_is_its_messages_one_after_another(tokens):
    assert tokens.render(
        {
            "tools": [TOOL],
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weigh it"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "2 kg"},
                {"role": "assistant", "content": "Two."},
                {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "this?"}]},
            ],
        }
    ) == (
        "<｜begin▁of▁sentence｜><｜begin▁sys｜>You may call these functions:\n"
        '{"type": "function", "function": {"name": "weigh", "description": null, "parameters": {"type": "object", '
        '"properties": {}}}}<｜end▁sys｜><｜begin▁sys｜>Be brief.<｜end▁sys｜><｜User｜>Weigh it<｜Assistant｜>'
        '<｜tool▁call▁begin｜>weigh<｜tool▁sep｜>{"what": "fish"}<｜tool▁call▁end｜><｜end▁of▁sentence｜>'
        "<｜tool▁output▁begin｜>2 kg<｜tool▁output▁end｜><｜Assistant｜>Two.<｜end▁of▁sentence｜>"
        "<｜User｜>And\nthis?<｜Assistant｜>"
    )


contents = st.text(st.characters(codec="utf-8"), max_size=60)
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), contents), min_size=1, max_size=6)


@settings(max_examples=60)
@given(turns=turns)
def test_ids_are_those_of_the_reference_tokenizer(tokens, reference, turns):
    body = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert tokens.chat(body) == reference.encode(tokens.render(body), add_special_tokens=False).ids


@settings(max_examples=40)
@given(turns=turns, more=contents)
def test_the_demo_template_extends_turn_by_turn(tokens, turns, more):
    messages = [{"role": role, "content": content} for role, content in turns]
    asked = tokens.render({"messages": messages})
    answered = tokens.render(
        {"messages": [*messages, {"role": "assistant", "content": more}], "add_generation_prompt": False}
    )
    assert answered == asked + more + "<｜end▁of▁sentence｜>"


def test_a_final_message_is_continued_where_it_ends(tokens):
    body = {"add_generation_prompt": False, "continue_final_message": True}
    for text in ("Two", "Two ", "Two\n\n", ""):
        messages = [{"role": "user", "content": "Weigh it"}, {"role": "assistant", "content": text}]
        assert tokens.render({**body, "messages": messages}).endswith("<｜Assistant｜>" + text)


def test_a_template_that_strips_is_continued_without_the_blank(tmp_path):
    tokens = build(tmp_path, "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    body = {"add_generation_prompt": False, "continue_final_message": True}
    for text in ("Two", "Two  "):
        assert tokens.render({**body, "messages": [{"role": "assistant", "content": text}]}) == "[Two"


def test_a_template_that_loops_over_parts_gets_parts(tmp_path):
    tokens = build(
        tmp_path,
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}",
    )
    assert (
        tokens.render(
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]},
                    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "d"}]},
                ]
            }
        )
        == "<s>user:(a)user:(b)(c)tool:d"
    )


def test_what_a_template_may_use(tmp_path):
    tokens = build(
        tmp_path,
        "{%- for m in messages %}\n    {%- if loop.last %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n{%- endfor %}{{ thinking }}|"
        "{{ {'a': 'é', 'b': '<'} | tojson }}|{{ strftime_now('%Y') | length }}|{{ documents | length }}",
    )
    assert (
        tokens.render(
            {
                "messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
                "chat_template_kwargs": {"thinking": True},
                "documents": [{}],
            }
        )
        == 'xTrue|{"a": "é", "b": "<"}|4|1'
    )


def test_named_templates_and_one_in_the_request(tmp_path):
    tokens = build(tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    body = {"messages": [{"role": "user", "content": ""}]}
    assert tokens.render(body) == "plain"
    assert tokens.render({**body, "tools": [TOOL]}) == "tools"
    assert tokens.render({**body, "tools": [TOOL], "tool_choice": "none"}) == "tools"  # as vLLM by default
    assert tokens.render({**body, "chat_template": "given"}) == "given"


SAYING = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
SHOWN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ 'tools;' if tools }}"
    "{{ enable_thinking | default('') }}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, ">"),
        ({"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": True}}, ""),
        ({"add_generation_prompt": "no"}, ""),
        ({"chat_template_kwargs": {"messages": None, "tools": "auto", "namespace": 1, "truncation": 2}}, ">"),
        ({"tools": [TOOL], "chat_template_kwargs": {"tools": None}}, "tools;>"),
        ({"chat_template_kwargs": {"tools": [TOOL]}}, "tools;>"),
        ({"reasoning_effort": "none"}, "False>"),
        ({"reasoning_effort": "low"}, "True>"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": None}}, ">"),
    ],
)
def test_fields_win_over_template_variables(tmp_path, more, text):
    """Each rendered by vLLM 0.28 and 0.32, like those that follow."""
    tokens = build(tmp_path, SHOWN)
    assert tokens.render({"messages": SAYING, **more}) == "user:a;assistant:b;user:c;" + text


@pytest.mark.parametrize(
    "own",
    [
        {"messages": []},
        {"messages": "x"},
        {"conversation": []},
        {"tokenizer": "x"},
        {"model_config": "x"},
        {"self": "x"},
        {"tools": "x"},
        {"documents": "x"},
        {"return_assistant_tokens_mask": True},
        {"chat_template": ""},
    ],
)
def test_template_variables_that_vllm_refuses(tokens, own):
    for ask, body in (
        (requests.chat, {"messages": SAYING}),
        (requests.responses, {"input": "a"}),
        (requests.anthropic, {"messages": SAYING, "max_tokens": 1}),
    ):
        ask(body, tokens)
        with pytest.raises(RequestError) as refused:
            ask({**body, "chat_template_kwargs": own}, tokens)
        assert refused.value.status == 400


@pytest.mark.parametrize("template", ["", "x"])
def test_a_template_in_a_request_is_refused_where_the_api_has_that_field(tokens, template):
    for ask in (requests.chat, requests.embeddings):
        with pytest.raises(RequestError, match="--trust-request-chat-template is not set"):
            ask({"messages": SAYING, "chat_template": template}, tokens)
    assert requests.responses({"input": "a", "chat_template": template}, tokens).prompts


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "add_special_tokens"])
@pytest.mark.parametrize("value", [None, "perhaps", 2, []])
def test_a_flag_is_true_or_false(tokens, name, value):
    with pytest.raises(RequestError, match="must be true or false"):
        requests.chat({"messages": SAYING, name: value}, tokens)


def test_developers_are_systems_for_a_template_that_does_not_name_them(tmp_path):
    def developer(content, **more):
        return {"role": "developer", "content": content, **more}

    tokens = build(tmp_path, SHOWN)
    first = [developer("D", tools=[TOOL]), *SAYING]
    assert tokens.render({"messages": first}) == "system:D;user:a;assistant:b;user:c;>"
    among = [{"role": "system", "content": "S"}, SAYING[0], developer([{"type": "text", "text": "D"}]), developer("")]
    assert tokens.render({"messages": among}) == "system:S\n\nD;user:a;>"
    assert build(tmp_path, SHOWN + "{# 'developer' #}").render({"messages": [developer("D")]}) == "developer:D;>"


def test_what_truncation_leaves(tmp_path):
    tokens = build(tmp_path, "{{ messages[0].content }}").within(6)
    bare = Tokens(tmp_path)
    words = "a b b b a"
    for side, ids in ((None, [0, 1]), ("left", [0, 1]), ("right", [1, 0])):
        body = {"truncate_prompt_tokens": 2, "truncation_side": side}
        assert requests.completion({"prompt": words, **body}, bare).prompts == [ids]
        assert requests.chat({"messages": [{"role": "user", "content": words}], **body}, bare).prompts == [ids]
    assert requests.completion({"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": "3"}, tokens).prompts == [[2, 3, 4]]
    assert requests.completion({"prompt": [1, 2], "truncate_prompt_tokens": 3.0}, tokens).prompts == [[1, 2]]
    assert requests.embeddings({"input": [1, 2, 3], "truncate_prompt_tokens": 2}, tokens).prompts == [[1, 2]]
    many = list(range(1, 10))
    asked = requests.completion({"prompt": many, "truncate_prompt_tokens": -1}, tokens)
    assert asked.prompts == [many[-5:]]  # one token of the context is for the answer
    said = requests.responses({"input": "a " * 9, "truncation": "auto", "max_output_tokens": 1}, tokens)
    assert len(said.prompts[0]) == 5
    for wrong in ({"truncate_prompt_tokens": keep} for keep in (0, -2, 7, 1.5, "x")):
        with pytest.raises(RequestError):
            requests.completion({"prompt": many, **wrong}, tokens)
    with pytest.raises(RequestError, match="truncation_side"):
        requests.completion({"prompt": many, "truncate_prompt_tokens": 2, "truncation_side": "both"}, tokens)


def test_special_tokens_stay_unless_the_request_names_a_side(tmp_path):
    build(tmp_path, "{{ messages[0].content }}")
    path = tmp_path / "tokenizer.json"
    reader = tokenizers.Tokenizer.from_file(str(path))
    reader.post_processor = tokenizers.processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    reader.save(str(path))
    tokens = Tokens(tmp_path)
    for body, ids in (
        ({}, [2, 0, 1]),
        ({"truncation_side": "left"}, [0, 0, 1]),
        ({"truncation_side": "right"}, [2, 1, 0]),
    ):
        body = {"prompt": "a b c a", "truncate_prompt_tokens": 3, **body}
        assert requests.completion(body, tokens).prompts == [ids]
    assert requests.completion({**body, "add_special_tokens": False}, tokens).prompts == [[1, 0, 0]]
    assert requests.responses({"input": "a"}, tokens).prompts == [[2, 1]]  # added there, and not in a chat
    assert requests.chat({"messages": [{"role": "user", "content": "a"}]}, tokens).prompts == [[1]]


def test_without_a_template_chats_are_refused(tmp_path):
    with pytest.raises(RequestError, match="no chat template"):
        build(tmp_path).chat({"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x"}], "tools": []},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 3},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
        {"messages": ["x"]},
        {"messages": [{}]},
    ],
)
def test_bodies_that_are_no_conversation(tokens, body):
    with pytest.raises(RequestError):
        tokens.chat(body)


def test_responses_become_the_chat_they_stand_for(tokens):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weigh it"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weigh", "arguments": '{"what": "fish"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2 kg"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two."}]},
        {"role": "user", "content": "And this?"},
    ]
    flat = {"type": "function", **TOOL["function"]}
    chat = tokens.chat(
        {
            "tools": [TOOL],
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weigh it"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "2 kg"},
                {"role": "assistant", "content": "Two."},
                {"role": "user", "content": "And this?"},
            ],
        }
    )
    assert requests.responses({"instructions": "Be brief.", "input": items, "tools": [flat]}, tokens).prompts == [chat]
    unfinished = [items[0], {**items[4], "status": "incomplete"}]
    assert tokens.decode(requests.responses({"input": unfinished}, tokens).prompts[0]).endswith("<｜Assistant｜>Two.")


def test_messages_become_the_chat_they_stand_for(tokens):
    body = {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "tools": [{"name": "weigh", "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": "Weigh it"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm."},
                    {"type": "tool_use", "id": "c1", "name": "weigh", "input": {"what": "fish"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "kg"}],
                    },
                    {"type": "text", "text": "And this?"},
                ],
            },
            {"role": "system", "content": " Really."},
        ],
    }
    assert requests.anthropic(body, tokens).prompts == [
        tokens.chat(
            {
                "tools": [TOOL],
                "messages": [
                    {"role": "system", "content": "Be brief. Really."},
                    {"role": "user", "content": "Weigh it"},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "2\nkg"},
                    {"role": "user", "content": "And this?"},
                ],
            }
        )
    ]
