"""What coding agents send besides texts and functions, and what is known of a conversation with more than that."""

import json

import pytest

from cachemap import GuessedBlocks
from gateway.prompt.api.anthropic import Habits, from_messages
from gateway.prompt.api.conversation import Multimodal, Unroutable
from gateway.prompt.api.responses import from_responses
from gateway.prompt.quirks import VersionQuirks
from replicas.engines.sglang import Sglang
from replicas.engines.vllm.versions import version_quirks

from .test_pipeline import CHAT, MESSAGES, RESPONSES

FUNCTION = {"name": "shell", "description": "Run it.", "parameters": {"type": "object"}, "strict": False}
SHELL = {"type": "function", **FUNCTION}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch", "format": {"type": "text"}}
LOOK_UP = {"type": "function", "name": "look_up", "description": "x", "parameters": {}, "defer_loading": False}
SPACE = {"type": "namespace", "name": "mcp", "description": "n", "tools": [LOOK_UP, {"type": "custom", "name": "c"}]}
KINDS = "web_search web_search_preview local_shell tool_search apply_patch shell mcp"
NOT_SHOWN = [{"type": kind} for kind in KINDS.split()]
INPUT = {"type": "string", "description": "The freeform text payload for this tool."}
ONE_TEXT = {"type": "object", "properties": {"input": INPUT}, "required": ["input"], "additionalProperties": False}
CUSTOM = {"name": "apply_patch", "description": "Patch", "parameters": ONE_TEXT}
NAMED = {"name": "mcp__look_up", "description": "x", "parameters": {}, "defer_loading": False}


def quirks(version):
    return VersionQuirks.of(version_quirks(version))


@pytest.mark.parametrize(
    "version, tools, shown",
    [
        ("0.28.0", [SHELL, *NOT_SHOWN, PATCH, SPACE], [FUNCTION, NAMED]),
        ("0.32.0", [SHELL, *NOT_SHOWN, PATCH, SPACE], [FUNCTION, CUSTOM, NAMED]),
        ("0.33.0", [SPACE, PATCH], [NAMED, CUSTOM]),
        ("0.32.0", NOT_SHOWN, []),
        ("0.28.0", [PATCH], []),
        ("0.32.0", [], None),
    ],
)
def test_the_model_is_shown_functions_alone(version, tools, shown):
    """As `construct_tool_dicts` of each version made it."""
    chat = from_responses({"input": "x", "tools": tools}, quirks(version))
    assert (chat.tools if chat.tools is None else [tool["function"] for tool in chat.tools]) == shown


def test_a_release_that_may_not_show_custom_tools_is_not_called_exact():
    with pytest.raises(Unroutable, match="custom"):
        from_responses({"input": "x", "tools": [PATCH]}, quirks("0.30.0"))
    assert from_responses({"input": "x", "tools": [SHELL, *NOT_SHOWN]}, quirks("0.30.0")).tools


def test_vllms_rules_are_not_taken_for_another_engines():
    other = VersionQuirks.of(Sglang().version_quirks("0.5"))
    assert from_responses({"input": "x", "tools": [SHELL]}, other).tools
    for tool in (PATCH, SPACE, NOT_SHOWN[0]):
        with pytest.raises(Unroutable, match="this engine"):
            from_responses({"input": "x", "tools": [SHELL, tool]}, other)
    chat = from_messages({"messages": [result({"type": "tool_reference", "name": "f"})]}, Habits(False, None), False)
    assert isinstance(chat.unknown, Multimodal) and not chat.messages


def test_calls_of_a_namespace_have_both_names():
    items = [
        {"type": "function_call", "call_id": "1", "name": "look_up", "namespace": "mcp", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "shell", "namespace": "", "arguments": "{}"},
    ]
    (message,) = from_responses({"input": items}).messages
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["mcp__look_up", "shell"]


def result(*content):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(content)}]}


def translated(messages, **more):
    return from_messages({"messages": messages, **more}, Habits(False, None))


def test_what_a_result_refers_to_is_a_message_of_its_own_and_what_is_not_shown_is_none():
    found = [{"type": "tool_reference", "tool_name": "f"}, {"type": "tool_reference", "name": "g"}]
    dropped = [{"type": "search_result", "source": "s", "content": []}, {"type": "document", "source": {}}]
    said = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert translated([result(*found, *said, *dropped)]).messages == [
        {"role": "tool", "tool_call_id": "t", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "tool_reference", "name": one} for one in "fg"]},
    ]
    assert translated([result(*dropped)]).messages == [{"role": "tool", "tool_call_id": "t", "content": ""}]


def test_tools_that_come_and_go_inside_a_conversation_are_those_at_its_end():
    tools = [{"name": name, "input_schema": {}, "defer_loading": True} for name in ("a", "b", "c")]

    def change(kind, **tool):
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    def names(*changes):
        talk = [{"role": "user", "content": "x"}, *changes]
        functions = [tool["function"] for tool in translated(talk, tools=tools).tools]
        return [(one["name"], one.get("defer_loading")) for one in functions]

    gone = change("tool_removal", type="tool_reference", name="a")
    back = change("tool_addition", type="tool_reference", name="a")
    new = change("tool_addition", type="tool_definition", definition={"name": "d", "input_schema": {}})
    assert names() == [("a", True), ("b", True), ("c", True)]
    assert names(gone) == [("b", True), ("c", True)]
    assert names(gone, back, new) == [("a", None), ("b", True), ("c", True), ("d", None)]
    with pytest.raises(Unroutable, match="not there"):
        names(change("tool_addition", type="tool_reference", name="z"))


# --- what is not known


LONG = "The quick brown fox jumps over the lazy dog. " * 12


def codex(*more):
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]},
        {"type": "function_call", "call_id": "1", "name": "shell", "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "1", "output": LONG},
    ]
    return RESPONSES, {"instructions": LONG, "tools": [SHELL, *NOT_SHOWN], "input": [*items, *more]}


def claude(*more):
    messages = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shell", "input": {}}]},
        result({"type": "text", "text": LONG}),
    ]
    tools = [{"name": "shell", "description": "Run it.", "input_schema": {"type": "object"}}]
    return MESSAGES, {"system": LONG, "tools": tools, "max_tokens": 1, "messages": [*messages, *more]}


def chat(*more):
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]
    return CHAT, {"messages": [*messages, {"role": "assistant", "content": "Yes."}, *more]}


def block(kind):
    return {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": kind, "id": "1"}]}


SESSIONS = [
    (codex, {"type": "web_search_call", "id": "ws_1", "status": "completed"}),
    (codex, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}),
    (codex, {"type": "local_shell_call", "call_id": "2", "action": {}}),
    (codex, {"type": "item_reference", "id": "i"}),
    (claude, block("document")),
    (claude, block("server_tool_use")),
    (claude, block("web_search_tool_result")),
    (chat, block("file")),
    (chat, block("hologram")),
]


def asked(pipeline, session):
    path, body = session
    return pipeline.prepare(path, json.dumps(body).encode())


@pytest.fixture(params=["sim", "qwen3", "llama3_2"])
def model(request, load_model):
    """Those that take a user's question behind a tool's result."""
    return load_model(request.param)


@pytest.mark.parametrize("session, item", SESSIONS)
def test_a_conversation_is_exact_up_to_what_is_not_known(model, session, item):
    """By two questions that differ in the next message alone: what both of them have in common is known."""
    pipeline, _ = model
    known = asked(pipeline, session({"role": "user", "content": "a"}))
    assert known.mode == "exact"
    prompt = asked(pipeline, session(item))
    assert prompt.mode == "partly" and type(prompt.hashes) is GuessedBlocks and not prompt.kind
    assert item.get("type", "message") in prompt.note or item["content"][1]["type"] in prompt.note
    size = pipeline.block_size
    # all but the answer that the item may belong to
    assert prompt.hashes.known >= (known.tokens - 40) // size > 10
    assert list(prompt.hashes[: prompt.hashes.known]) == list(known.hashes[: prompt.hashes.known])
    assert prompt.tokens > prompt.hashes.known * size


@pytest.mark.parametrize("session, item", SESSIONS[::4])
def test_the_next_turn_goes_on_where_the_last_one_ended(model, session, item):
    pipeline, _ = model
    first = asked(pipeline, session(item))
    second = asked(pipeline, session(item, {"role": "user", "content": LONG}))
    other = asked(pipeline, session({**item, "id": "another"}, {"role": "user", "content": LONG}))
    assert second.hashes.known == first.hashes.known
    assert list(second.hashes[: len(first.hashes)]) == list(first.hashes) and len(second.hashes) > len(first.hashes)
    assert list(other.hashes[: first.hashes.known]) == list(first.hashes[: first.hashes.known])


def test_what_holds_for_no_part_of_a_prompt_is_matched_as_text(sim):
    """A conversation is known again though the place where its cache is to end, and a checksum, are others."""
    pipeline, _ = sim

    def ask(checksum, marked, *more):
        texts = (f"x-anthropic-billing-header: cch={checksum};", LONG)
        head = [{"type": "text", "text": one} for one in texts]
        said = [{"role": "user", "content": [{"type": "text", "text": LONG}]} for _ in range(3)]
        said[marked]["content"][0]["cache_control"] = {"type": "ephemeral"}
        body = {"system": head, "messages": [*said, *more], "tools": [{"type": "bash_20250124", "name": "bash"}]}
        return pipeline.prepare(MESSAGES, json.dumps(body).encode())

    first, second = ask("a1", 1), ask("b2", 2, {"role": "user", "content": LONG})
    assert first.mode == second.mode == "text" and "schema" in first.note
    assert list(second.hashes[: len(first.hashes)]) == list(first.hashes) and len(first.hashes) > 20


def test_media_behind_what_is_not_known_and_before_it():
    from .media.models import image, pipeline, system, text, user

    def ask(*messages):
        return pipeline().prepare(CHAT, json.dumps({"messages": [system(), *messages]}).encode())

    seen = user(text("What is this?"), image("https://example.com/red.png"))
    before = ask(user({"type": "hologram"}), seen)
    behind = ask(seen, user({"type": "hologram"}))
    assert before.mode == behind.mode == "partly" and min(before.hashes.known, behind.hashes.known) > 10


def test_what_a_template_writes_by_what_follows_is_not_known(load_model):
    """Mistral's writes the system's text before the last question, DeepSeek's all of its texts at the front."""
    item = {"role": "user", "content": [{"type": "hologram"}]}
    for name, more, least in (("mistral_nemo", (), 6), ("deepseek_v3", (), 14), ("deepseek_v3", ("s",), 0)):
        pipeline, _ = load_model(name)
        rest = [{"role": "system", "content": "s"} for _ in more]
        prompt = asked(pipeline, chat(item, *rest))
        beginnings = [asked(pipeline, chat({"role": "user", "content": said}, *rest)) for said in ("a", "b")]
        common = next(
            (i for i, pair in enumerate(zip(*(one.hashes for one in beginnings), strict=False)) if pair[0] != pair[1]),
            99,
        )
        known = getattr(prompt.hashes, "known", 0)
        assert least <= known <= common and list(prompt.hashes[:known]) == list(beginnings[0].hashes[:known])
