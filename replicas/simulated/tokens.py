"""The prompts of a simulated engine: chats rendered by the model's Jinja template, and text as token ids.

Bodies that clients and agents usually send are rendered as by vLLM. vLLM's rendering of rare bodies is recorded in
`tests/gateway/prompt`, and `make test-vllm` compares with vLLM itself.
"""

import datetime
import json
import re
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Self

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MARK = "CONTINUE-FINAL-MESSAGE-HERE "  # put after a message that the answer is to continue
# Templates with such a loop get a message's content as parts, others as one text.
LOOPS_OVER_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+(?:\w+(?:\.content\b|\[['"]content['"]\])|content\b)""")
ATTRIBUTION = "x-anthropic-billing-header"  # begins a line of system text that one client changes with every request
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


class RequestError(Exception):
    """An error: the engine refuses a request, with the HTTP status and the fields of vLLM's error object."""

    def __init__(self, message: str, status: int = 400, type: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status, self.type, self.param = status, type, param

    def body(self) -> dict:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.status}}


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's tokens for training; here it only renders its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    tags = [_Generation, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=tags)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


class Tokens:
    """The tokenizer and the chat templates of a model folder."""

    between_parts = "\n"  # joins the texts of a message if the template takes one text

    def __init__(self, model_dir: Path):
        model_dir = Path(model_dir)
        config_file, template_file = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        # a special token is a string, or an AddedToken written as a mapping
        special = {name: config[name] for name in config if name.endswith("_token")}
        texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in special.items()}
        self._special = {name: text for name, text in texts.items() if isinstance(text, str)}
        self._load_tokenizer(model_dir / "tokenizer.json")
        self.eos_id = self.token_id(self._special.get("eos_token"))
        self.context_length: int | None = None  # of the engine; None: unknown
        given = template_file.read_text() if template_file.is_file() else config.get("chat_template") or []
        named = [{"name": "default", "template": given}] if isinstance(given, str) else given
        environment = _environment()
        self._templates = {
            one["name"]: (environment.from_string(one["template"]), bool(LOOPS_OVER_PARTS.search(one["template"])))
            for one in named
        }

    def within(self, context_length: int) -> Self:
        """Return a copy of this object for an engine with this context length."""
        made = copy(self)
        made.context_length = context_length
        return made

    def _load_tokenizer(self, path: Path) -> None:
        try:
            import fastokens

            self._tokenizer = fastokens.Tokenizer.from_file(str(path))
            self.vocab_size = self._tokenizer.vocab_size
        except Exception:  # fastokens does not support every tokenizer.json; the reference does
            import tokenizers

            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self.vocab_size = self._tokenizer.get_vocab_size()

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def chat(self, body: dict) -> list[int]:
        """Return the token ids of a body with `messages`. Raises RequestError if an engine refuses such a body."""
        return self.encode(self.render(body), body.get("add_special_tokens") is True)

    def truncated(self, ids: list[int], body: dict, outputs: bool, side: str = "left") -> list[int]:
        """Return a prompt's ids, cut to the length in the body's field `truncate_prompt_tokens` if it is given.

        The value -1 means the engine's context length, less one token if `outputs` are wanted. `side`: the end at which
        tokens are removed if the body does not say; "left" keeps the last tokens.
        """
        keep = body.get("truncate_prompt_tokens")
        if keep is None:
            return ids
        longest = len(ids) if self.context_length is None else self.context_length
        if type(keep) is not int or keep < -1 or (keep > longest and self.context_length):
            name = "truncate_prompt_tokens"
            raise RequestError(f"`{name}` must be -1 to {longest}, not {keep!r}", param=name)
        keep = longest - outputs if keep == -1 else keep
        if len(ids) <= keep:
            return ids
        return ids[:keep] if (body.get("truncation_side") or side) == "right" else ids[len(ids) - keep :]

    def render(self, body: dict) -> str:
        """Return the prompt's text for a body with `messages`. Raises RequestError if an engine refuses such a body."""
        own, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
        if not isinstance(own, dict):
            raise RequestError("`chat_template_kwargs` must be an object", param="chat_template_kwargs")
        tools = self.tools(body.get("tools"))
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError("this model has no chat template: use /v1/completions")
        template, takes_parts = self._templates[name]
        messages = [self._message(one, takes_parts) for one in listed(body.get("messages"), "messages")]
        if not messages:
            raise RequestError("`messages` must be a list with at least one message", param="messages")
        asks, go_on = body.get("add_generation_prompt", True), bool(body.get("continue_final_message"))
        if go_on and asks:
            raise RequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if go_on:
            messages[-1] = _marked(messages[-1])
        variables = {"documents": None, "tools": tools} | {name: one for name, one in own.items() if one is not None}
        variables |= {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) is not None}
        if effort is not None:
            variables.setdefault("enable_thinking", effort != "none")
        variables |= {"add_generation_prompt": asks, "messages": messages}
        try:
            text = template.render(self._special | variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        return _up_to_mark(text) if go_on else text

    def tools(self, given: Any) -> list[dict] | None:
        """Return tools as vLLM gives them to a template: the fields it knows, in its order, absent ones as null."""
        if given is None:
            return None
        if not listed(given, "tools") or not all(_is_function(tool) for tool in given):
            raise RequestError("`tools` must be a non-empty list of objects with a named `function`", param="tools")
        return [_tool(tool, tool["function"]) for tool in given]

    def _message(self, message: Any, takes_parts: bool) -> dict:
        """Return a message as a chat template expects it.

        Its content is a list of parts if the template takes parts (`takes_parts`), else one text. Arguments of tool
        calls are objects.
        """
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("each message must be an object with a `role`", param="messages")
        seen = {name: message[name] for name in ("role", "name", "tool_call_id") if message.get(name) is not None}
        texts = _texts(message.get("content"))
        if seen["role"] == "system":
            texts = [text.partition("\n")[2] if text.startswith(ATTRIBUTION) else text for text in texts]
        if takes_parts and seen["role"] != "tool":
            seen["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            seen["content"] = self.between_parts.join(filter(None, texts))
        if seen["role"] == "assistant":
            if (thought := message.get("reasoning") or message.get("reasoning_content")) is not None:
                seen |= dict.fromkeys(("thinking", "reasoning", "reasoning_content"), thought)
            if calls := listed(message.get("tool_calls"), "tool_calls"):
                seen["tool_calls"] = [_call(call) for call in calls]
        return seen


def listed(given: Any, name: str) -> list:
    """Return the value of an optional field of a request, [] if it is absent. Raises RequestError if it is no list."""
    if given is not None and not isinstance(given, list):
        raise RequestError(f"`{name}` must be a list", param=name)
    return given or []


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tool(tool: dict, function: dict) -> dict:
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    more = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    made = {"type": "function", "function": shown | {name: one for name, one in more.items() if one is not None}}
    return made if deferred is None else made | {"defer_loading": deferred}


def _texts(content: Any) -> list[str]:
    """Return the texts of a message's content."""
    texts = []
    for part in [content] if isinstance(content, str) else listed(content, "messages"):
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS:
            text = part if isinstance(part, str) else part.get(kind if kind in ("refusal", "thinking") else "text")
        else:
            raise RequestError(f"this model takes text only, not a content part of type {kind!r}", param="messages")
        if text is not None and not isinstance(text, str):
            raise RequestError("a content part's text must be a string", param="messages")
        texts += [] if text is None else [text]
    return texts


def _call(call: Any) -> dict:
    """Return a tool call with its arguments as an object; arguments that are no JSON object become an empty one."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RequestError("each tool call must be an object with a `function`", param="messages")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


def _marked(message: dict) -> dict:
    """Return a conversation's final message with MARK after its text.

    The rendered prompt is cut at the mark (`_up_to_mark`), so that the engine continues the message.
    """
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + MARK}
    if not content:
        raise RequestError("`continue_final_message` needs a final message with text")
    return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + MARK}]}


def _up_to_mark(text: str) -> str:
    """Return a rendered prompt up to the mark that `_marked` has added.

    MARK ends with a blank. If the template stripped that blank, it would have stripped blanks at the end of the
    message's text too, so these are removed.
    """
    at = text.rfind(MARK.rstrip())
    if at < 0:
        raise RequestError("`continue_final_message` is set, but the chat template does not show the final message")
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()
