"""Request bodies to compare tokens by: `CORPUS` names one per thing that can change a prompt."""

from __future__ import annotations

import json
from typing import Any

from gateway.prompt.prompt import CHAT, COMPLETIONS, MESSAGES, RESPONSES

Body = dict[str, Any]

# Text that looks like structure to templates, tokenizers or JSON, or that a careless step would normalize.
ODD = {
    "unicode": "na\u00efve Stra\u00dfe \u4f60\u597d\uff0c\u4e16\u754c \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "combining": "e\u0301 vs \u00e9, \ufb01 vs fi, \u2126 vs \u03a9, \u1e9e",
    "emoji": "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3f4\U000e0067\U000e0062\U000e007f\u2764\ufe0f",
    "invisible": "a\u200bb\u00adc\ufeffd\u2028e\u00a0f\u3000g",
    "controls": "a\x00b\x07c\x1bd\x7fe\ufffdf",
    "blanks": "  two\n\n\tand  \r\n more \n \n",
    "only blanks": " \n\t ",
    "jinja": "{{ messages }} {% if x %} {# no #} {%- endif -%}",
    "special tokens": "<|im_start|>system\n<|im_end|></s>[INST]<|eot_id|><think>\n</think><\uff5cUser\uff5c><\uff5cend\u2581of\u2581sentence\uff5c><|begin_of_text|>",
    "halves of them": "<|im_ start|> <|im_start <think [INST <|eot_id<|im_end|>|>",
    "markup": "&amp; <b>\"x\"</b> 'y' \\n \\u00e9 </tool_call>",
    "numbers": "1234567 3.14159 1e10 -0.0 0xff 1,000,000",
    "code": "def f(x):\n\tif x:\n        return  x  # done\n\n\n",
    "long": "The quick brown fox jumps over 13 lazy dogs. " * 60,
}
ODD_TEXTS = list(ODD.values())

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather \u2600 of a \"city\"", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "a <b>name</b>"}, "days": {"type": "integer", "default": 1}},
    "required": ["city"]}}}  # fmt: skip
SHUFFLED = {"function": {"strict": True, "parameters": {"required": [], "properties": {}, "type": "object"}, "name": "look_up"},
            "type": "function"}  # fmt: skip
NUMBERS = {"type": "function", "function": {"name": "n", "parameters": {
    "minimum": -0.0, "maximum": 1e3, "multipleOf": 0.1, "big": 12345678901234567, "small": 1e-9, "t": True, "none": None}}}  # fmt: skip
TOOLS = [
    WEATHER,
    SHUFFLED,
    NUMBERS,
    {"type": "function", "function": {"name": "bare"}},
    {"type": "function", "function": {"name": "null", "description": None, "parameters": None}},
    {"type": "function", "extra": 1, "function": {"name": "more", "unknown": {"a": 1}, "description": ""}},
    {"type": "function", "defer_loading": True, "function": {"name": "later"}},
]
FLAT = {"type": "function", "name": "shell", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": False}  # fmt: skip
CUSTOM = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "docs", "description": "d", "tools": [
    {"type": "function", "name": "find", "description": "d", "parameters": {"type": "object"}}, {"type": "custom", "name": "c"}]}  # fmt: skip
DOCUMENT = {"title": "A title", "text": "Some text \u00e9"}


def user(content: Any, **more: Any) -> Body:
    return {"role": "user", "content": content, **more}


def system(content: Any) -> Body:
    return {"role": "system", "content": content}


def said(content: Any, **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


def result(content: Any, **more: Any) -> Body:
    return {"role": "tool", "tool_call_id": "call00001", "content": content, **more}


def call(arguments: Any, name: str = "get_weather", **more: Any) -> Body:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def text(value: str, kind: str = "text", **more: Any) -> Body:
    return {"type": kind, "text": value, **more}


PLAIN = [system("Be brief."), user("What is 2 and 2?"), said("Four."), user("And 3 and 3?")]
CALLED = [user("Weather in Paris?"), said("", tool_calls=[call('{"city": "Paris"}')]), result("rain")]


def chat(*messages: Body, **more: Any) -> tuple[str, Body]:
    return CHAT, {"messages": list(messages), **more}


def complete(prompt: Any, **more: Any) -> tuple[str, Body]:
    return COMPLETIONS, {"prompt": prompt, **more}


def respond(given: Any, **more: Any) -> tuple[str, Body]:
    return RESPONSES, {"input": given, **more}


def message(*messages: Body, **more: Any) -> tuple[str, Body]:
    return MESSAGES, {"messages": list(messages), "max_tokens": 16, **more}


CORPUS: dict[str, tuple[str, Body]] = {
    # who speaks, and in which order
    "one message": chat(user("Hello")),
    "a conversation": chat(*PLAIN),
    "ends with the assistant": chat(*PLAIN[:3]),
    "system alone": chat(system("Only this.")),
    "two users in a row": chat(user("one"), user("two"), said("three"), said("four"), user("five")),
    "system in the middle": chat(user("one"), system("Be kind."), user("two")),
    "two systems": chat(system("one"), system("two"), user("three")),
    "developer": chat({"role": "developer", "content": "Be brief."}, user("Hello")),
    "developer in the middle": chat(system("S"), user("one"), {"role": "developer", "content": "D"}, user("two")),
    "developer with tools": chat({"role": "developer", "content": "Be brief.", "tools": [WEATHER]}, user("Hello")),
    "an unheard-of role": chat(user("one"), {"role": "critic", "content": "two"}, user("three")),
    "names": chat(user("one", name="bob"), said("two", name="al"), user("three", name="")),
    "unknown keys": chat(user("one", mood="good", weight=3), said("two", prefix=True), user("three")),
    "long conversation": chat(system("Be brief."), *(f(f"{f.__name__} number {i} ") for i in range(20) for f in (user, said)), user("end")),
    # what is said
    "empty texts": chat(system(""), user(""), said(""), user("")),
    "no content": chat(user("one"), said(None), user("two")),
    "blanks around": chat(system("  s  "), user(" \n a \n "), said("\n\nb  "), user("  c")),
    **{f"odd text: {name}": chat(system(value), user(value), said(value), user(value + value)) for name, value in ODD.items()},
    # content parts
    "one part": chat(user([text("one")])),
    "several parts": chat(system([text("a"), text("b")]), user([text("one"), text(" two "), text("")]), said([text("x"), text("y")]), user([text("z")])),
    "no parts": chat(user("one"), said([]), user([])),
    "refusal part": chat(user("one"), said([{"type": "refusal", "refusal": "no"}]), user("two")),
    "thinking part": chat(user("one"), said([{"type": "thinking", "thinking": "hm"}, text("two")]), user("three")),
    "part without a type": chat(user([{"text": "one"}])),
    "part with a cache mark": chat(system([text("s", cache_control={"type": "ephemeral"})]), user([text("one", cache_control={"type": "ephemeral"})])),
    # tools
    "a tool": chat(user("Weather?"), tools=[WEATHER]),
    "many tools": chat(system("S"), user("Weather?"), tools=TOOLS),
    "tools and no system": chat(user("one"), said("two"), user("three"), tools=[SHUFFLED, WEATHER]),
    "tool_choice none": chat(user("Weather?"), tools=[WEATHER], tool_choice="none"),
    "tool_choice auto": chat(user("Weather?"), tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False),
    "tool_choice required": chat(user("Weather?"), tools=[WEATHER, SHUFFLED], tool_choice="required"),
    "tool_choice named": chat(user("Weather?"), tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}),
    "tool call and result": chat(*CALLED, tools=[WEATHER]),
    "tool call, result, answer": chat(*CALLED, said("Rain."), user("And in Rome?"), tools=[WEATHER]),
    "tool call without tools": chat(*CALLED),
    "several calls at once": chat(user("?"), said(None, tool_calls=[call('{"city": "Paris"}'), call('{"city":"Rome","days":2}', id="call00002")]), result("rain"), result("sun", tool_call_id="call00002"), tools=[WEATHER]),
    "call with words": chat(user("?"), said("I'll look.", tool_calls=[call('{"city": "Paris"}')]), result("rain"), tools=[WEATHER]),
    "call without content": chat(user("?"), {"role": "assistant", "tool_calls": [call("{}")]}, result("rain"), tools=[WEATHER]),
    "no calls": chat(user("?"), said("no", tool_calls=[]), user("!"), tools=[WEATHER]),
    "arguments: none": chat(user("?"), said("", tool_calls=[call("")]), result("rain"), tools=[WEATHER]),
    "arguments: null": chat(user("?"), said("", tool_calls=[call("null")]), result("rain"), tools=[WEATHER]),
    "arguments: no JSON": chat(user("?"), said("", tool_calls=[call("Paris, please")]), result("rain"), tools=[WEATHER]),
    "arguments: a list": chat(user("?"), said("", tool_calls=[call('["Paris"]')]), result("rain"), tools=[WEATHER]),
    "arguments: a number": chat(user("?"), said("", tool_calls=[call("42")]), result("rain"), tools=[WEATHER]),
    "arguments: numbers": chat(user("?"), said("", tool_calls=[call('{"a": 1e3, "b": -0.0, "c": 10.0, "d": 123456789012345678901234567890, "e": NaN}')]), result("rain"), tools=[WEATHER]),
    "arguments: odd texts": chat(user("?"), said("", tool_calls=[call(json.dumps(ODD)), call(json.dumps(ODD, ensure_ascii=False, indent=2))]), result("rain"), tools=[WEATHER]),
    "call with more keys": chat(user("?"), said("", tool_calls=[{"index": 0, "function": {"zed": 1, "arguments": "{}", "name": "f"}, "type": "function", "id": "c12345678"}]), result("r", tool_call_id="c12345678"), tools=[WEATHER]),
    "result in parts": chat(*CALLED[:2], result([text("rain"), text("and sun")]), tools=[WEATHER]),
    "result with a name": chat(*CALLED[:2], result("rain", name="get_weather"), tools=[WEATHER]),
    "result without an id": chat(*CALLED[:2], {"role": "tool", "content": "rain"}, tools=[WEATHER]),
    "result of JSON": chat(*CALLED[:2], result('{"sky": "grey \u2601", "mm": 3.0}'), tools=[WEATHER]),
    # reasoning
    "reasoning": chat(user("one"), said("two", reasoning="hm, so"), user("three")),
    "reasoning_content": chat(user("one"), said("two", reasoning_content="hm, so"), user("three")),
    "both reasonings": chat(user("one"), said("two", reasoning="A", reasoning_content="B"), user("three")),
    "reasoning before a call": chat(user("?"), said("", reasoning="I look", tool_calls=[call('{"city": "Paris"}')]), result("rain"), tools=[WEATHER]),
    "reasoning in the text": chat(user("one"), said("<think>\nhm\n</think>\n\ntwo"), user("three"), said("<think>x</think>four"), user("five")),
    **{f"effort {one}": chat(*PLAIN, reasoning_effort=one) for one in ("none", "low", "high")},
    # fields about rendering
    "add_generation_prompt false": chat(*PLAIN, add_generation_prompt=False),
    "continue": chat(*PLAIN[:3], continue_final_message=True, add_generation_prompt=False),
    "continue with a blank": chat(user("one"), said("Well, "), continue_final_message=True, add_generation_prompt=False),
    "continue parts": chat(user("one"), said([text("a"), text("b")]), continue_final_message=True, add_generation_prompt=False),
    "continue the user": chat(user("one and"), continue_final_message=True, add_generation_prompt=False),
    "continue both": chat(user("one"), said("two"), continue_final_message=True),
    "continue words said twice": chat(user("yes"), said("yes"), user("yes"), said("yes"), continue_final_message=True, add_generation_prompt=False),
    "thinking off": chat(*PLAIN, chat_template_kwargs={"enable_thinking": False}),
    "thinking on": chat(*PLAIN, chat_template_kwargs={"enable_thinking": True, "thinking": True}),
    "a date": chat(*PLAIN, chat_template_kwargs={"date_string": "26 Jul 2024"}),
    "tools apart": chat(*PLAIN, tools=[WEATHER], chat_template_kwargs={"tools_in_user_message": False}),
    "variables of no use": chat(*PLAIN, chat_template_kwargs={"foo": [1, {"a": None}], "bar": None, "baz": "auto"}),
    "variables that are arguments": chat(*PLAIN, chat_template_kwargs={"add_generation_prompt": False, "documents": [DOCUMENT], "bos_token": "<x>"}),
    "tools as a variable": chat(*PLAIN, chat_template_kwargs={"tools": [WEATHER]}),
    "no variables": chat(*PLAIN, chat_template_kwargs={}),
    "documents": chat(*PLAIN, documents=[DOCUMENT, {"title": "B"}]),
    "special tokens added": chat(*PLAIN, add_special_tokens=True),
    "truncated": chat(*PLAIN, truncate_prompt_tokens=7),
    "truncated left": chat(*PLAIN, truncate_prompt_tokens=7, truncation_side="left"),
    "truncated right": chat(*PLAIN, truncate_prompt_tokens=7, truncation_side="right"),
    "truncated, special tokens added": chat(*PLAIN, truncate_prompt_tokens=7, add_special_tokens=True),
    "truncated to all": chat(*PLAIN, truncate_prompt_tokens=-1),
    "Claude Code's line": chat(system("x-anthropic-billing-header: cc=1\nYou are."), user("Hello")),
    "Claude Code's line alone": chat(system("x-anthropic-billing-header: cc=1"), user("Hello")),
    "Claude Code's line in parts": chat(system([text("x-anthropic-billing-header: cc=1"), text("You are.")]), user([text("x-anthropic-billing-header: u")])),
    # fields that are not about the prompt
    "sampling": chat(*PLAIN, temperature=0.5, top_p=0.9, seed=1, stop=["x"], logprobs=True, top_logprobs=2, n=2, user="u", logit_bias={"5": 1}),
    "a format": chat(*PLAIN, response_format={"type": "json_object"}),
    "unknown fields": chat(*PLAIN, something="else", metadata={"a": "b"}, store=False, service_tier="auto", priority=1, cache_salt="s"),
    "echo": chat(*PLAIN, echo=True),
    # ids that came with the request
    "ids beside messages": chat(*PLAIN, kv_transfer_params={"prompt_token_ids": [5, 6, 7, 8, 9]}),
    "ids beside messages, cut": chat(*PLAIN, kv_transfer_params={"prompt_token_ids": [5, 6, 7, 8, 9]}, truncate_prompt_tokens=3),
    "ids beside messages, echo": chat(*PLAIN, kv_transfer_params={"prompt_token_ids": [5, 6, 7, 8, 9]}, echo=True),
    "ids beside an input": respond("Hello", kv_transfer_params={"prompt_token_ids": [5, 6, 7, 8, 9]}),
    "no ids": chat(*PLAIN, kv_transfer_params={"prompt_token_ids": [], "do_remote_decode": False}),
    # completions
    "a text": complete("Hello, world"),
    **{f"odd completion: {name}": complete(value) for name, value in ODD.items()},
    "texts": complete(["Hello", "a longer text than the first", "x"]),
    "ids": complete([1, 2, 3, 1000, 5]),
    "lists of ids": complete([[1, 2], [3, 4, 5, 6], [7]]),
    "a text in a list": complete(["Hello"]),
    "no special tokens": complete("Hello", add_special_tokens=False),
    "ids and special tokens": complete([5, 6, 7], add_special_tokens=True),
    "echoed": complete("Hello, world", echo=True),
    "truncated text": complete(ODD["long"], truncate_prompt_tokens=9),
    "truncated text, left": complete(ODD["long"], truncate_prompt_tokens=9, truncation_side="left"),
    "truncated text, right": complete(ODD["long"], truncate_prompt_tokens=9, truncation_side="right"),
    "truncated ids": complete(list(range(1, 30)), truncate_prompt_tokens=5),
    "truncated texts": complete([ODD["long"], "short"], truncate_prompt_tokens=3, add_special_tokens=False),
    "all of a text": complete("Hello, world", truncate_prompt_tokens=-1),
    "completion's own fields": complete("Hello", suffix=None, best_of=1, n=2, logprobs=1, user="u"),
    # Responses
    "asked in a word": respond("Hello"),
    "instructions": respond("Hello", instructions="Be brief."),
    "items": respond([user("one"), said("two"), user([text("three", "input_text")])]),
    "items of a system": respond([{"role": "developer", "content": "Be brief."}, system("S"), user("Hello")]),
    "an answer given back": respond([user("one"), {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "two", "annotations": []}]}, user("three")]),
    "an answer to go on with": respond([user("one"), {"type": "message", "id": "msg_1", "role": "assistant", "status": "incomplete", "content": [{"type": "output_text", "text": "two and", "annotations": []}]}]),
    "calls of Responses": respond([user("?"), {"type": "function_call", "call_id": "call00001", "name": "get_weather", "arguments": '{"city": "Paris"}'}, {"type": "function_call_output", "call_id": "call00001", "output": "rain"}], tools=[{"type": "function", "name": "get_weather", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": False}]),
    "thought, called, told": respond([user("?"), {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}, {"type": "function_call", "call_id": "call00001", "name": "get_weather", "arguments": "{}"}, {"type": "function_call_output", "call_id": "call00001", "output": [text("rain", "input_text")]}, user("so?")]),
    "a summary of thoughts": respond([user("?"), {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}, user("so?")]),
    "effort of Responses": respond("Hello", reasoning={"effort": "low"}),
    "no effort": respond("Hello", reasoning={"effort": "none"}),
    "variables of Responses": respond("Hello", chat_template_kwargs={"enable_thinking": False}),
    "truncation auto": respond("Hello", truncation="auto"),
    **{f"odd response: {name}": respond(value, instructions=value) for name, value in ODD.items()},
    # Anthropic's Messages
    "a message": message(user("Hello")),
    "a system": message(user("Hello"), system="Be brief."),
    "system blocks": message(user("Hello"), system=[text("x-anthropic-billing-header: cc=1"), text("Be brief. ", cache_control={"type": "ephemeral"}), text("Be kind.")]),
    "system that is a line": message(user("Hello"), system="x-anthropic-billing-header: cc=1"),
    "a talk of blocks": message(user([text("one"), text("two")]), said([text("three")]), user("four")),
    "thought aloud": message(user("one"), said([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}, text("two")]), user("three")),
    "a tool used": message(user("?"), said([text("I look."), {"type": "tool_use", "id": "toolu_001", "name": "get_weather", "input": {"city": "M\u00fcnchen", "days": 1.0}}]), user([{"type": "tool_result", "tool_use_id": "toolu_001", "content": "rain"}, text("so?")]), tools=[{"name": "get_weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]),
    "two tools used": message(user("?"), said([{"type": "tool_use", "id": "toolu_001", "name": "a", "input": {}}, {"type": "tool_use", "id": "toolu_002", "name": "b", "input": {"x": None}}]), user([{"type": "tool_result", "tool_use_id": "toolu_001", "content": [text("rain"), text("sun")]}, {"type": "tool_result", "tool_use_id": "toolu_002"}]), tools=[{"name": "a", "input_schema": {"properties": {}}}, {"name": "b", "description": "x", "input_schema": {}}], tool_choice={"type": "any"}),
    "a system among messages": message(user("one"), said("two"), system("now be kind"), user("three"), system="Be brief."),
    "thinking disabled": message(user("Hello"), thinking={"type": "disabled"}),
    "thinking enabled": message(user("Hello"), thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048),
    "effort of Messages": message(user("Hello"), output_config={"effort": "high"}),
    "variables of Messages": message(user("Hello"), chat_template_kwargs={"enable_thinking": False}),
    "continued by prefill": message(user("Hello"), said("Well,")),
    "nothing said": message(user("one"), said([]), user("two")),
    **{f"odd message: {name}": message(user(value), said([text(value)]), user([text(value), text(value)]), system=value) for name, value in ODD.items()},
}  # fmt: skip

# What coding agents send besides.
AGENTS: dict[str, tuple[str, Body]] = {
    "tools that are no functions": respond("Hello", tools=[{"type": "web_search"}, {"type": "local_shell"}, {"type": "web_search_preview"}]),
    "tools of every kind": respond("Hello", tools=[FLAT, {"type": "web_search"}, CUSTOM, SPACE]),
    "a call of a namespace": respond([user("?"), {"type": "function_call", "call_id": "call00001", "namespace": "docs", "name": "find", "arguments": "{}"}, {"type": "function_call_output", "call_id": "call00001", "output": "rain"}], tools=[SPACE]),
    "references to tools": message(user("?"), said([{"type": "tool_use", "id": "toolu_001", "name": "a", "input": {}}]), user([{"type": "tool_result", "tool_use_id": "toolu_001", "content": [text("two"), {"type": "tool_reference", "tool_name": "a"}, {"type": "tool_reference", "name": "b"}]}]), tools=[{"name": "a", "input_schema": {}}]),
    "a result of what is not shown": message(user("?"), said([{"type": "tool_use", "id": "toolu_001", "name": "a", "input": {}}]), user([{"type": "tool_result", "tool_use_id": "toolu_001", "content": [{"type": "search_result", "source": "s", "title": "t", "content": [text("x")]}, {"type": "document", "source": {}}]}]), tools=[{"name": "a", "input_schema": {}}]),
    "tools that come and go": message(user("one"), system([{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "a"}}, {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "c", "input_schema": {}}}}]), user("two"), tools=[{"name": name, "input_schema": {}} for name in "ab"]),
}  # fmt: skip
