"""Bodies that are too long, too loose, or not to be known exactly; and those of embeddings."""

from __future__ import annotations

from typing import Any

from gateway.prompt.prompt import CHAT, COMPLETIONS, EMBEDDINGS

from .bodies import DOCUMENT, ODD, PLAIN, WEATHER, Body, chat, complete, message, respond, text, user

# Longer than the context of a small engine: cut to what leaves room for the output.
_MANY = list(range(1, 20_000))
TOO_LONG: dict[str, tuple[str, Body]] = {
    "ids, output not said": complete(_MANY, truncate_prompt_tokens=-1),
    "ids, one token": complete(_MANY, truncate_prompt_tokens=-1, max_tokens=1),
    "ids, a hundred tokens": complete(_MANY, truncate_prompt_tokens=-1, max_tokens=100),
    "text": complete("x y " * 12_000, truncate_prompt_tokens=-1, max_tokens=8),
    "chat, one token": chat(user("x y " * 12_000), truncate_prompt_tokens=-1, max_tokens=1),
    "chat, a hundred tokens": chat(user("x y " * 12_000), truncate_prompt_tokens=-1, max_completion_tokens=100, max_tokens=7),
    "truncation auto": respond("x y " * 12_000, truncation="auto", max_output_tokens=50),
}  # fmt: skip

_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
# What cannot be known from the body alone.
INEXACT: dict[str, tuple[str, Body]] = {
    "an image": chat(user([text("What is this?"), _IMAGE])),
    "an image in Messages": message(user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}])),
    "an image in Responses": respond([user([{"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}])]),
    "sound": chat(user([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}])),
    "a suffix": complete("def f(", suffix="return x"),
    "embeds": complete("x", prompt_embeds="AAAA"),
    "a template of its own": chat(*PLAIN, chat_template="{{ messages[0].content }}"),
    "a template among the variables": chat(*PLAIN, chat_template_kwargs={"chat_template": "x"}),
    "a conversation that the engine keeps": respond("Hello", previous_response_id="resp_1"),
    "an item of an unknown kind": respond([user("x"), {"type": "item_reference", "id": "i"}]),
    "a tool of Anthropic's own": message(user("x"), tools=[{"type": "bash_20250124", "name": "bash"}]),
    "padding": (EMBEDDINGS, {"input": "x", "padding": "max_length"}),
}  # fmt: skip

_HELLO = b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]'
_ASKED = b'{"model": "tiny", "max_tokens": 1, "prompt": '
# Looser than the standards of JSON and of the API: (path, body, whether vLLM takes it).
LOOSE: dict[str, tuple[str, bytes, bool]] = {
    "NaN somewhere": (CHAT, _HELLO + b', "x": NaN}', True),
    "an infinite number": (CHAT, _HELLO + b', "x": 1e999}', True),
    "NaN as a temperature": (CHAT, _HELLO + b', "temperature": NaN}', False),
    "Infinity in a tool": (CHAT, _HELLO + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": Infinity}}}]}', True),
    "a big integer in a tool": (CHAT, _HELLO + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 18446744073709551616}}}]}', True),
    "a big integer of many digits": (CHAT, _HELLO + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": -123456789012345678901234567890}}}]}', True),
    "the largest float in a tool": (CHAT, _HELLO + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1.79e308, "b": 1E19}}}]}', True),
    "a big integer in arguments": (CHAT, _HELLO[:-1] + b', {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 18446744073709551616}"}}]}]}', True),
    "the largest of 64 bits": (CHAT, _HELLO + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 18446744073709551615}}}]}', True),
    "half a surrogate pair as a name": (CHAT, _HELLO + b', "user": "\\ud83d"}', True),
    "half a surrogate pair in a text": (CHAT, _HELLO.replace(b"hi", b"\\ud83d") + b"}", False),
    "half a surrogate pair in bytes": (CHAT, _HELLO.replace(b"hi", b"\xed\xa0\xbd") + b"}", False),
    "a byte order mark": (CHAT, b"\xef\xbb\xbf" + _HELLO + b"}", True),
    "UTF-16": (CHAT, (_HELLO + b"}").decode().encode("utf-16"), True),
    "no UTF-8": (CHAT, _HELLO.replace(b"hi", b"\xff") + b"}", False),
    "a key twice": (CHAT, _HELLO + b', "messages": [{"role": "user", "content": "the second one"}]}', True),
    "stream as a word": (CHAT, _HELLO + b', "stream": "false"}', True),
    "stream as a number": (CHAT, _HELLO + b', "stream": 0}', True),
    "no stream": (CHAT, _HELLO + b', "stream": null}', True),
    "stream as another word": (CHAT, _HELLO + b', "stream": "perhaps"}', False),
    "numbers as words": (CHAT, _HELLO + b', "max_tokens": "1", "n": "1"}', True),
    "whole numbers with a point": (CHAT, _HELLO + b', "max_tokens": 1.0, "n": true}', True),
    "half a token": (CHAT, _HELLO + b', "max_tokens": 1.5}', False),
    "a flag as a word": (CHAT, _HELLO + b', "add_generation_prompt": "no"}', True),
    "a flag as a number": (CHAT, _HELLO + b', "add_generation_prompt": 0}', True),
    "a flag that is null": (CHAT, _HELLO + b', "add_generation_prompt": null}', False),
    "truncation as a word": (COMPLETIONS, _ASKED + b'"a b c d e f", "truncate_prompt_tokens": "3"}', True),
    "ids as flags": (COMPLETIONS, _ASKED + b"[true, 2]}", True),
    "ids with a point": (COMPLETIONS, _ASKED + b"[1.0, 2]}", True),
    "ids with a fraction": (COMPLETIONS, _ASKED + b"[1.5, 2]}", False),
    "texts that are numbers": (COMPLETIONS, _ASKED + b'["1", "2"]}', True),
    "no prompt": (COMPLETIONS, _ASKED[:-12] + b"}", False),
    "no model": (CHAT, b'{"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}', True),
}  # fmt: skip

EMBEDDED: dict[str, tuple[str, Body]] = {
    **{name: (EMBEDDINGS, body) for name, body in {
        "a text": {"input": "Hello, world"},
        "texts": {"input": ["Hello", "a longer text than the first"]},
        "ids": {"input": [1, 2, 3]},
        "lists of ids": {"input": [[1, 2], [3, 4, 5]]},
        "no special tokens": {"input": "Hello", "add_special_tokens": False},
        "cut": {"input": ODD["long"], "truncate_prompt_tokens": 70},
        "cut on the left": {"input": ODD["long"], "truncate_prompt_tokens": 70, "truncation_side": "left"},
        "cut on the right": {"input": ODD["long"], "truncate_prompt_tokens": 70, "truncation_side": "right"},
        "cut ids": {"input": list(range(1, 200)), "truncate_prompt_tokens": 70},
        "cut, no special tokens": {"input": ODD["long"], "truncate_prompt_tokens": 70, "add_special_tokens": False},
        "cut to all": {"input": ODD["long"], "truncate_prompt_tokens": -1},
        "a conversation": {"messages": PLAIN},
        "a conversation with a prompt": {"messages": PLAIN, "add_generation_prompt": True},
        "a conversation to go on with": {"messages": PLAIN[:3], "continue_final_message": True},
        "a conversation cut": {"messages": [user(ODD["long"])], "truncate_prompt_tokens": 70},
        "special tokens of a conversation": {"messages": PLAIN, "add_special_tokens": True},
        "variables": {"messages": PLAIN, "chat_template_kwargs": {"date_string": "26 Jul 2024"}},
        "tools of no use": {"messages": PLAIN, "tools": [WEATHER], "documents": [DOCUMENT], "reasoning_effort": "low"},
        "fields about the vector": {"input": "Hello", "encoding_format": "base64", "user": "u"},
        **{f"odd: {name}": {"input": value} for name, value in ODD.items()},
    }.items()},
}  # fmt: skip

_OF_CHAT = {
    "add_generation_prompt": (False, True, None),
    "continue_final_message": (True, None), "bos_token": ("<x>", ""), "chat_template": ("", None, "auto"),
    "conversation": ([],), "documents": ([], [DOCUMENT], "x"),
    "enable_thinking": (True, False, None, "auto", 0, "false", []), "max_length": (5,),
    "messages": ([], None, "auto", [user("x")], "x"), "model_config": ("x",), "namespace": ("x",),
    "padding": ("max_length",), "reasoning_effort": ("high", None), "return_assistant_tokens_mask": (True, False),
    "self": ("x",), "tokenize": (True,), "tokenizer": ("x",), "tools": ([], [WEATHER], None, "x"), "truncation": (True,),
}  # fmt: skip


def _developer(content: Any, **more: Any) -> Body:
    return {"role": "developer", "content": content, **more}


# How a client steers the rendering, allowed or not.
STEERED: dict[str, tuple[str, Body]] = {
    **{
        f"variable {name} {value!r:.40}": chat(*PLAIN, chat_template_kwargs={name: value})
        for name, values in _OF_CHAT.items()
        for value in values
    },
    "effort and thinking null": chat(*PLAIN, reasoning_effort="none", chat_template_kwargs={"enable_thinking": None}),
    "two efforts": chat(*PLAIN, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}),
    "two lists of documents": chat(*PLAIN, documents=[DOCUMENT], chat_template_kwargs={"documents": []}),
    "two lists of tools": chat(*PLAIN, tools=[WEATHER], chat_template_kwargs={"tools": []}),
    "tools and null": chat(*PLAIN, tools=[WEATHER], chat_template_kwargs={"tools": None}),
    "no prompt, and a variable for one": chat(*PLAIN, add_generation_prompt=False, chat_template_kwargs={"add_generation_prompt": True}),
    "go on, and a variable against it": chat(*PLAIN[:3], add_generation_prompt=False, continue_final_message=True, chat_template_kwargs={"add_generation_prompt": True, "continue_final_message": False}),
    **{f"cut to {keep!r}": chat(*PLAIN, truncate_prompt_tokens=keep) for keep in (0, -2, 1, 10, "10", 10.0, 10**7)},
    **{f"cut to 10, {side}": chat(*PLAIN, truncate_prompt_tokens=10, truncation_side=side) for side in ("left", "right", "x")},
    "a text cut to 2": complete("Hello world how are you", truncate_prompt_tokens=2),
    "a text cut to 0": complete("Hello world how are you", truncate_prompt_tokens=0),
    "a text, special tokens null": complete("Hello", add_special_tokens=None),
    **{
        f"{name} {value!r}": chat(*PLAIN, **{name: value})
        for name in ("add_generation_prompt", "add_special_tokens", "continue_final_message")
        for value in (None, "false", 0)
    },
    **{f"template {source!r}": chat(*PLAIN, chat_template=source) for source in ("", "x")},
    "developer alone": chat(_developer("hi")),
    "developer first": chat(_developer("Be brief."), user("Hello")),
    "developer after system": chat({"role": "system", "content": "S"}, _developer("D"), user("Hello")),
    "developer last": chat(user("Hello"), _developer("D")),
    "developer, empty": chat(_developer(""), user("Hello")),
    "developer in parts": chat(_developer([text("a"), text("b")]), user("Hello")),
    "developer, tools": chat(_developer("D", tools=[WEATHER]), user("Hello")),
    "developers": chat(_developer("D"), _developer("E"), user("Hello")),
    "developer in Messages": message(_developer("D"), user("Hello")),
    "developer in Responses": respond([_developer("D"), user("Hello")]),
    "Responses, variable messages": respond("Hello", chat_template_kwargs={"messages": []}),
    "Responses, variable add_generation_prompt": respond("Hello", chat_template_kwargs={"add_generation_prompt": False}),
    "Responses, a template": respond("Hello", chat_template=""),
    "Responses, cut": respond("Hello", truncate_prompt_tokens=3),
    "Messages, variable messages": message(user("Hello"), chat_template_kwargs={"messages": []}),
    "Messages, variable add_generation_prompt": message(user("Hello"), chat_template_kwargs={"add_generation_prompt": False}),
    "Messages, a template": message(user("Hello"), chat_template=""),
    "Messages, cut": message(user("Hello"), truncate_prompt_tokens=3),
}  # fmt: skip
