"""Rules for what reaches the template that the recorded vLLM cases do not name one by one."""

from copy import deepcopy
from dataclasses import replace

import pytest

from gateway.prompt.api.anthropic import Habits, from_messages, habits
from gateway.prompt.api.conversation import Unroutable, conversation
from gateway.prompt.api.openai import from_chat
from gateway.prompt.api.responses import from_responses
from gateway.prompt.quirks import NEWEST, Transformers, VersionQuirks
from gateway.prompt.render.template import ChatTemplate, TemplateError
from replicas.engines.vllm.versions import version_quirks

from ....vllm.bodies import result, said, system, text, user
from ..reference import environment

LATEST = replace(NEWEST, transformers=Transformers((5, 23)))  # a release that is known


def quirks(version):
    return VersionQuirks.of(version_quirks(version))


def one(message, **options):
    return conversation([message], options.pop("as_parts", False), **{"quirks": LATEST, **options})[0]


@pytest.mark.parametrize(
    "message, seen",
    [
        (user(None), user("")),
        ({"role": "user"}, user("")),
        (user([text("a"), "b", text("")]), user("a\nb")),
        (user("x", name="bob", extra=1), user("x", name="bob")),
        (user("x", name=None), user("x")),
        (said([{"type": "refusal", "refusal": "no"}]), said("no")),
        (said("x", reasoning_content="r"), said("x", reasoning="r", reasoning_content="r", thinking="r")),
        (said("x", tool_calls=[]), said("x")),
        (result("x"), result("x")),
        (result("x", tool_call_id=None), {"role": "tool", "content": "x"}),
        (system("x-anthropic-billing-header: cc=1;\nYou are"), system("You are")),
        (system("x-anthropic-billing-header"), system("")),
    ],
)
def test_messages(message, seen):
    assert one(message) == seen


@pytest.mark.parametrize(
    "version, copied, dropped",
    [
        *((version, None, None) for version in ("0.28.0", "0.30.0", "0.34.0", None)),
        *((version, False, False) for version in ("0.31.0", "0.32.0")),
        ("0.33.0", False, None),
    ],
)
def test_what_depends_on_the_release_of_transformers(version, copied, dropped):
    """5.20 drops keys that are None, 5.21 copies reasoning; a vLLM may be installed with several releases."""
    spoken = said("x", reasoning="r")
    called = {"role": "tool", "content": "x", "tool_call_id": None}
    if copied is None:
        with pytest.raises(Unroutable, match="transformers"):
            one(spoken, quirks=quirks(version), reads={"thinking"})
        assert "thinking" not in one(spoken, quirks=quirks(version))  # this template would not look for it
    else:
        assert ("thinking" in one(spoken, quirks=quirks(version), reads={"thinking"})) is copied
    if dropped is None:
        with pytest.raises(Unroutable, match="transformers"):
            one(called, quirks=quirks(version), reads={"tool_call_id"})
        assert one(called, quirks=quirks(version)) == {"role": "tool", "content": "x"}  # nothing would look for it
    else:
        assert ("tool_call_id" in one(called, quirks=quirks(version))) is not dropped


@pytest.mark.parametrize(
    "source, reads",
    [
        ("{{ m.thinking }}", True),
        ("{{ m['thinking'] }}", True),
        ('{% if "thinking" in m %}', True),
        ("{{ messages[-1] | tojson }}", True),
        ("{{ message|tojson }}", True),
        ("{{ enable_thinking }}{{ m.reasoning_content }}", False),
        ("{{ m.content | tojson }}", False),
    ],
)
def test_which_templates_may_look_for_thinking(source, reads):
    source = source.replace("{% if", "{% set x =")
    assert ("thinking" in ChatTemplate(source, {}).reads) is reads
    assert ("tools" in ChatTemplate(source.replace("thinking", "tools"), {}).reads) is reads


NAMES_DEVELOPER = (
    "{% for m in messages %}{% if m.role in ['system', 'developer'] %}S{% endif %}{{ m.content }}{% endfor %}"
)
DEVELOPER = {"role": "developer", "content": "D"}
BY_RELEASE = ("0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", None)


@pytest.mark.parametrize("version", BY_RELEASE)
def test_a_developers_message_is_certain_where_the_template_does_not_look_at_its_tools(version):
    """vLLM gives it a key `tools` that is null, which some releases of transformers drop."""
    template = ChatTemplate("{{ tools }}" + NAMES_DEVELOPER, {}, quirks(version))
    followed = {"quirks": template.quirks, "reads": template.reads}
    talk = conversation([DEVELOPER, user("u")], template.takes_parts, template.knows_developer, **followed)
    assert template.render(talk, None, {}) == "NoneSDu"
    looks = ChatTemplate(NAMES_DEVELOPER + "{{ messages[0].tools is defined }}", {}, quirks(version))
    certain = quirks(version).drops_none is not None
    if certain:
        assert conversation([DEVELOPER], False, quirks=looks.quirks, reads=looks.reads)
    else:
        with pytest.raises(Unroutable, match="transformers"):
            conversation([DEVELOPER], False, quirks=looks.quirks, reads=looks.reads)


@pytest.mark.parametrize(
    "source, tells",
    [
        ("{{ strftime_now('%d %b %Y') }}", False),
        ("{{ strftime_now('%Y-%m-%d, %A, %-j, 100%%') }}", False),
        ("{% if strftime_now is defined %}{{ strftime_now('%B') }}{% endif %}", False),
        ("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}", True),
        ("{% if tools %}{{ strftime_now('%c') }}{% endif %}", True),
        ("{{ strftime_now(pattern) }}", True),
        ("{% set now = strftime_now %}{{ now('%d') }}", True),
        ("{{ 'strftime_now' }}", False),
    ],
)
def test_which_templates_tell_the_time_of_the_day(source, tells):
    assert ChatTemplate(source, {}).prints_time is tells


@pytest.mark.parametrize(
    "arguments, seen",
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ("not json", {}),
        (3, {}),
        ('{"a": 1e2}', {"a": 100.0}),
    ],
)
def test_arguments_are_objects(arguments, seen):
    call = {"type": "function", "id": "i", "function": {"name": "f", "arguments": arguments, "z": 0}, "index": 0}
    made = one({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]
    assert made == {"id": "i", "function": {"arguments": seen, "name": "f", "z": 0}, "type": "function", "index": 0}
    assert list(made) == ["id", "function", "type", "index"] and list(made["function"]) == ["arguments", "name", "z"]
    kept = one({"role": "assistant", "tool_calls": [call]}, by_schema=False)["tool_calls"][0]
    assert list(kept) == list(call) and list(kept["function"]) == ["name", "arguments", "z"]


def test_parts_for_templates_that_loop_over_them():
    parts = [{"type": "input_text", "text": "a", "cache_control": 1}, "b", {"type": "text", "text": ""}]
    assert one({"role": "user", "content": parts}, as_parts=True)["content"] == [
        {"type": "text", "text": "a", "cache_control": 1},
        text("b"),
        {"type": "text", "text": ""},
    ]
    assert one({"role": "user", "content": "x"}, as_parts=True)["content"] == [{"type": "text", "text": "x"}]
    assert one({"role": "tool", "content": parts}, as_parts=True)["content"] == "a\nb\n"


@pytest.mark.parametrize(
    "request_, variables",
    [
        ({}, None),
        ({"chat_template_kwargs": {"a": 1, "b": None, "c": "auto"}}, {"a": 1}),
        ({"chat_template_kwargs": {"a": 1, "namespace": "x", "range": [1]}}, {"a": 1}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"documents": [{"title": "t"}], "chat_template_kwargs": {"documents": []}}, {"documents": [{"title": "t"}]}),
    ],
)
def test_template_variables(request_, variables):
    seen = from_chat({"messages": [], **request_}).variables
    assert seen == (
        variables
        if variables is None
        else {**variables, "add_generation_prompt": True, "continue_final_message": False}
    )


def test_items_of_one_assistant_turn_join():
    items = [
        user("q"),
        {"type": "reasoning", "content": [{"text": "r"}]},
        *({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in "12"),
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "message", **said([text("a", "output_text")]), "status": "incomplete"},
    ]
    chat = from_responses({"input": items, "instructions": "i"})
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2]["reasoning"] == "r" and [c["id"] for c in chat.messages[2]["tool_calls"]] == ["1", "2"]
    assert chat.variables == {"add_generation_prompt": False, "continue_final_message": True}
    assert chat.special


def test_messages_blocks():
    thought, used = (
        {"type": "thinking", "thinking": "h"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"é": 1}},
    )
    request = {
        "system": [text("x-anthropic-billing-header: 1"), text("s")],
        "messages": [
            user([{"type": "tool_result", "tool_use_id": "t", "content": [text("r")]}]),
            system("reminder"),
            said([thought, text("a"), used]),
        ],
    }
    inside = from_messages(request, Habits(False, "none")).messages
    assert [m["role"] for m in inside] == ["system", "tool", "system", "assistant"]
    assert inside[3] == {
        "role": "assistant",
        "reasoning": "h",
        "content": "a",
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"\\u00e9": 1}'}}],
    }
    moved = from_messages(request, Habits(True, "none")).messages
    assert [m["role"] for m in moved] == ["system", "tool", "assistant"] and moved[0]["content"] == "sreminder"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ enable_thinking }}", Habits(False, "none")),
        ("x", Habits(False, "low")),
    ],
)
def test_what_vllm_finds_out_by_asking_the_template(source, expected):
    assert habits(ChatTemplate(source, {})) == expected


LOOP = "{% for c in CONTENT %}{{ c }}{% endfor %}"


def macro(parameter, argument):
    looped = LOOP.replace("CONTENT", parameter)
    return f"{{% macro f({parameter}) %}}{looped}{{% endmacro %}}{{% for m in messages %}}{{{{ f({argument}) }}}}{{% endfor %}}"


@pytest.mark.parametrize(
    "source, parts",
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}" + LOOP.replace("CONTENT", "m.content") + "{% endfor %}", True),
        ("{% for m in messages %}" + LOOP.replace("CONTENT", "m['content'] | list") + "{% endfor %}", True),
        (
            "{% set rest = messages[1:] %}{% for m in rest %}" + LOOP.replace("CONTENT", "m.content") + "{% endfor %}",
            True,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}"
            + LOOP.replace("CONTENT", "content")
            + "{% endfor %}",
            True,
        ),
        (macro("x", "m.content"), True),
        (macro("x", "m.tools"), False),
        (macro("content", "tools"), False),
        ("{% for m in messages %}" + LOOP.replace("CONTENT", "m.tool_calls") + "{% endfor %}", False),
    ],
)
def test_which_templates_take_parts(source, parts):
    environment().from_string(source)
    assert ChatTemplate(source, {}).takes_parts is parts


@pytest.mark.parametrize(
    "shown, content, expected",
    [
        ("m.content", "so far  ", "<q><so far  "),
        ("m.content | trim", "so far  ", "<q><so far"),
        (
            "m.content if m.content is string else m.content[0].text + m.content[1].text + m.content[2].type",
            [{"type": "text", "text": "so "}, {"type": "text", "text": "far"}, {"type": "image"}],
            "<q><so far",
        ),
    ],
)
def test_continued_messages_end_where_they_end(shown, content, expected):
    talk = [user("q"), said(content)]
    before, source = deepcopy(talk), "{% for m in messages %}<{{ " + shown + " }}>{% endfor %}"
    assert ChatTemplate(source, {}).render(talk, None, {"continue_final_message": True}) == expected
    assert talk == before


def test_messages_that_cannot_be_continued():
    for source, talk in (
        ("{{ messages[0].content }}", [user("a"), said("b")]),
        ("content", [{"role": "user"}]),
        ("nothing", [user("a")]),
        ("{{ messages[-1].content }}", [user([{"type": "image"}])]),
    ):
        with pytest.raises(TemplateError, match="continue_final_message"):
            ChatTemplate(source, {}).render(talk, None, {"continue_final_message": True})


def test_templates_are_kept_in_their_sandbox():
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}",
        "{{ raise_exception('no') }}",
    ):
        with pytest.raises(TemplateError):
            ChatTemplate(source + "{{ nothing.at.all }}", {}).render([user("x")], None, {})


INLINE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
FIRST_ONLY = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "source, first",
    [
        (INLINE, False),
        (FIRST_ONLY, True),
        (INLINE + "{{ bos_token }}", False),
        ("{{ bos_token + messages[0].content }}", True),  # original Llama 3
        (INLINE + "{{ strftime_now('%d') }}", True),
        ("{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}" + INLINE, False),
        ("{% generation %}" + INLINE + "{% endgeneration %}", True),  # Laguna
        ("{% if tools is not none %}{{ tools | length }}{% endif %}" + INLINE, False),
        ("{% if tools is not none %}{{ tools | tojson }}{% endif %}" + INLINE, True),  # functionary, Solar
        # Mistral-Small-3.2
        ("{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}" + INLINE, True),
        ("{% for m in messages %}{{ 1 / 0 }}{% endfor %}", True),
    ],
)
def test_where_messages_puts_system_texts(source, first):
    """vLLM asks in a sandbox that lacks most of what the template has when it renders."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, LATEST)
    assert habits(template).system_first is first
    # the tool_use template is asked, too
    assert habits(ChatTemplate(INLINE, {}, LATEST), [source]).system_first is first
