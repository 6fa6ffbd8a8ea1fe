"""Random mixtures of what `bodies` names: seeded, so that one that differs can be made again from its number."""

from __future__ import annotations

import json
import random
from typing import Any

from .bodies import CHAT, COMPLETIONS, MESSAGES, ODD_TEXTS, RESPONSES, TOOLS, Body, call, result, said, text, user


class Mixer:
    """Random bodies from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._one, self._chance = self._random.choice, lambda part: self._random.random() < part

    def body(self) -> tuple[str, Body]:
        make = self._one([self.chat, self.chat, self.chat, self.chat, self.completion, self.response, self.message])
        return make()

    def text(self, empty: bool = True) -> str:
        words = ["hello world", "I am", " the quick", "Don't", " 3.14", "def f(x):", "\n", " ", "x"]
        count = self._random.randrange(0 if empty else 1, 7)
        pieces = [self._one(ODD_TEXTS[:-1] if self._chance(0.3) else words) for _ in range(count)]
        made = "".join(piece[: self._random.randrange(1, 40)] for piece in pieces)
        return made if empty or made.strip() else made + "x"

    def content(self) -> Any:
        if self._chance(0.2):
            return [text(self.text()) for _ in range(self._random.randrange(1, 4))]
        return self.text()

    def arguments(self) -> str:
        keys, values = ["city", "n", "\u00e9", "<b>"], [1, 2.5, None, True, 'Paris "x"', [1, "a"], {"b": 1e-7}]
        made = {self._one(keys): self._one([*values, self.text()]) for _ in range(self._random.randrange(4))}
        written = json.dumps(made), json.dumps(made, ensure_ascii=False, indent=1)
        return self._one([*written, "", '{"a": 1e3,  "b":-0.0}'])

    def chat(self) -> tuple[str, Body]:
        messages: list[Body] = []
        if self._chance(0.5):
            messages.append({"role": self._one(["system", "system", "developer"]), "content": self.content()})
        for turn in range(self._random.randrange(1, 5)):
            messages.append(user(self.content(), **({"name": "bob"} if self._chance(0.1) else {})))
            if self._chance(0.7):
                messages += self._answer(turn)
        body: Body = {"messages": messages}
        if self._chance(0.3):
            body["tools"] = self._random.sample(TOOLS, self._random.randrange(1, 4))
            body["tool_choice"] = self._one(["auto", "none", "required"])
        variable = self._one(["enable_thinking", "foo", "date_string", "thinking"])
        fields = {
            "chat_template_kwargs": {variable: self._one([True, False, "26 Jul 2024", None])},
            "reasoning_effort": self._one(["none", "low", "high"]),
            "add_generation_prompt": False, "add_special_tokens": True,
            "documents": [{"title": "a", "text": self.text()}],
            "truncate_prompt_tokens": self._random.randrange(1, 40),
        }  # fmt: skip
        body.update({key: value for key, value in fields.items() if self._chance(0.1)})
        if self._chance(0.15):
            body.update(continue_final_message=True, add_generation_prompt=False)
        return CHAT, body

    def _answer(self, turn: int) -> list[Body]:
        answer = said(self._one([self.content(), self.content(), None]))
        if self._chance(0.25):
            answer[self._one(["reasoning", "reasoning_content"])] = self.text()
        if not self._chance(0.4):
            return [answer]
        names = [f"call{turn}000{i}" for i in range(self._one([1, 1, 2]))]
        answer["tool_calls"] = [call(self.arguments(), self._one(["get_weather", "\u00e9"]), id=name) for name in names]
        return [answer, *(result(self.content(), tool_call_id=name) for name in names)]

    def completion(self) -> tuple[str, Body]:
        prompts = [self.text(False), [self.text(False), self.text(False)], [1, 2, 3], [[1, 2], [3, 4, 5]]]
        body = {"prompt": self._one(prompts)}
        if self._chance(0.3):
            body["add_special_tokens"] = self._chance(0.5)
        if self._chance(0.2):
            body["truncate_prompt_tokens"] = self._random.randrange(2, 9)
        return COMPLETIONS, body

    def response(self) -> tuple[str, Body]:
        items: list[Body] = [user(self.text(False))]
        for _ in range(self._random.randrange(5)):
            items.append(self._one([
                user(self.text(False)), user([text(self.text(False), "input_text")]), said(self.text(False)),
                {"role": self._one(["system", "developer"]), "content": self.text(False)},
                {"type": "function_call", "call_id": "call00001", "name": "get_weather", "arguments": self.arguments()},
                {"type": "function_call_output", "call_id": "call00001", "output": self.text(False)},
                {"type": "reasoning", "id": "r", "summary": [], "content": [text(self.text(False), "reasoning_text")]},
            ]))  # fmt: skip
        body: Body = {"input": self._one([self.text(False), items, items])}
        if self._chance(0.4):
            body["instructions"] = self.text()
        if self._chance(0.3):
            tool = {"type": "function", "name": "get_weather", "description": "d", "parameters": {"type": "object"}}
            body["tools"] = [tool | {"strict": True}]
        return RESPONSES, body

    def message(self) -> tuple[str, Body]:
        messages: list[Body] = []
        for _ in range(self._random.randrange(1, 4)):
            told = {"type": "tool_result", "tool_use_id": "toolu_001"}
            told["content"] = self._one([self.text(), [text(self.text())]])
            asked = self.text(), [text(self.text())], [text(self.text()), text(self.text())]
            messages.append(user(self._one([*asked, [told, text(self.text())]])))
            if self._chance(0.8):
                used = {"type": "tool_use", "id": "toolu_001", "name": "get_weather", "input": {"city": self.text()}}
                thought = {"type": "thinking", "thinking": self.text(), "signature": "s"}
                answers = self.text(), [text(self.text()), used], [thought, text(self.text())], [thought, used]
                messages.append(said(self._one(answers)))
        body: Body = {"messages": messages, "max_tokens": 16}
        if self._chance(0.5):
            body["system"] = self._one([self.text(), [text(self.text()), text(self.text())]])
        if self._chance(0.3):
            body["tools"] = [{"name": "get_weather", "description": "d", "input_schema": {"properties": {}}}]
        return MESSAGES, body

    def asked_with_tools(self) -> tuple[str, Body]:
        """A question with tools whose schemas have whatever schemas may have."""
        tools = []
        for i in range(self._random.randrange(1, 4)):
            function: Body = {"name": self._one(["look_up", "\u00e9", "a.b-c"]) + str(i)}
            if self._chance(0.8):
                described = ["", "Look it up.", "two\nlines", "ends\n", "a\r\nb\n\n", self.text()]
                function["description"] = self._one(described)
            if self._chance(0.9):
                schemas = [self._object(0), self._object(0), self._object(0), {}, self._schema(0)]
                function["parameters"] = self._one(schemas)
            tools.append({"type": "function", "function": function})
        return CHAT, {"messages": [user("Which one?")], "tools": tools}

    def _object(self, depth: int) -> Body:
        names = self._random.sample(["city", "n", "\u00e9", "<b>", "a b", "x"], self._random.randrange(5))
        schema: Body = {"type": "object", "properties": {name: self._schema(depth + 1) for name in names}}
        if self._chance(0.6):
            schema["required"] = self._random.sample([*names, "other"], self._random.randrange(len(names) + 1))
        if self._chance(0.1):
            del schema["properties"]
        return schema

    def _schema(self, depth: int) -> Body:
        kinds = ["string", "integer", "number", "boolean", "null", ["string", "null"], ["integer", "boolean"], None]
        kind = self._one([*kinds, *(["object", "array", "object", "array"] if depth < 4 else [])])
        schema: Body = self._object(depth) if kind == "object" else {} if kind is None else {"type": kind}
        if kind == "array" and self._chance(0.8):
            schema["items"] = self._schema(depth + 1)
        values = ["x", 'y"z', "", 1, 2.5, 1e22, -0.0, None, True, ["a", 1], {"k": "\u00e9\n"}, 12345678901234567890]
        fields = {
            "description": self._one(["said", "", "multi\nline", self.text()]),
            "enum": self._one([["a"], ["a", 'b"c', "\u00e9"], [], ["a", 1, None], [1, 2]]),
            "default": self._one(values),
            "nullable": self._chance(0.7),
            "title": self._one(["A title", "", "two\nlines", 3]),
            "examples": self._one([["e", 1, None, 'y"z'], [], [1]]),
            "minimum": 3, "format": "date", "oneOf": [{"type": "string"}],
            "anyOf": [{"type": "string"}, {"type": "null"}], "const": "a", "$ref": "#/x", "additionalProperties": False,
        }  # fmt: skip
        rare = ("oneOf", "const", "$ref")
        return schema | {key: one for key, one in fields.items() if self._chance(0.02 if key in rare else 0.15)}


def random_tools(seed: int, count: int) -> list[tuple[str, Body]]:
    mixer = Mixer(seed)
    return [mixer.asked_with_tools() for _ in range(count)]


def random_bodies(seed: int, count: int) -> list[tuple[str, Body]]:
    mixer = Mixer(seed)
    return [mixer.body() for _ in range(count)]
