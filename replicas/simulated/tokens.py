"""The simulated engine's own way from a request to token ids, as vLLM goes it.

Written apart from the gateway's `prompt` room on purpose: each is the other's check. Nothing is memoised or
compiled here; a chat is rendered by the model's Jinja template, and the text is tokenized whole.
"""

import datetime
import json
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Self

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

CUT = "CONTINUE-FINAL-MESSAGE-HERE "
# Template variables that vLLM refuses: its own calls down to the template have arguments of these names.
TAKEN = frozenset({"conversation", "messages", "model_config", "self", "tokenizer"})
FLAGS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


class RequestError(Exception):
    """What the engine answers instead: an HTTP status and vLLM's error object."""

    def __init__(self, message: str, status: int = 400, type: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status, self.type, self.param = status, type, param


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's own tokens for training; renders its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def _takes_parts(template: str) -> bool:
    """Does the template loop over a message's content (it wants parts), or print it (it wants text)?"""
    tree = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[_Generation, jinja2.ext.loopcontrols]).parse(
        template
    )

    def is_content(node) -> bool:
        if isinstance(node, jinja2.nodes.Filter):
            return node.node is not None and is_content(node.node)
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        return (
            isinstance(node, jinja2.nodes.Getitem)
            and isinstance(node.arg, jinja2.nodes.Const)
            and node.arg.value == "content"
        )

    names = {
        assign.target.name
        for assign in tree.find_all(jinja2.nodes.Assign)
        if isinstance(assign.target, jinja2.nodes.Name) and is_content(assign.node)
    }
    return any(
        is_content(loop.iter) or (isinstance(loop.iter, jinja2.nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(jinja2.nodes.For)
    )


def _text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is a string or an AddedToken written as a mapping."""
    return value.get("content") if isinstance(value, dict) else value


class Tokens:
    """A model folder's tokenizer and chat template, which is filled as vLLM fills it."""

    between_parts = "\n"  # joins the texts of a message where the template takes one text

    def __init__(self, model_dir: Path):
        model_dir = Path(model_dir)
        config_file = model_dir / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        self._special = {
            name: _text(config[name])
            for name in config
            if name.endswith("_token") and isinstance(_text(config[name]), str)
        }
        self._load_tokenizer(model_dir / "tokenizer.json")
        self.eos_id = self.token_id(self._special.get("eos_token"))
        self.context_length: int | None = None  # of the engine that this is for; None: not known
        self._templates, self._takes_parts, self._knows_developer = {}, {}, {}
        environment = _environment()
        for name, source in self._sources(model_dir, config).items():
            self._templates[name] = environment.from_string(source)
            self._takes_parts[name] = _takes_parts(source)
            self._knows_developer[name] = _knows_developer(source)

    def within(self, context_length: int) -> Self:
        """The same for an engine with a context of so many tokens."""
        made = copy(self)
        made.context_length = context_length
        return made

    def _load_tokenizer(self, path: Path) -> None:
        try:
            import fastokens

            self._tokenizer = fastokens.Tokenizer.from_file(str(path))
            self.vocab_size = self._tokenizer.vocab_size
        except Exception:  # it does not do every kind of tokenizer.json: the reference does
            import tokenizers

            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self.vocab_size = self._tokenizer.get_vocab_size()

    @staticmethod
    def _sources(model_dir: Path, config: dict) -> dict[str, str]:
        file = model_dir / "chat_template.jinja"
        if file.is_file():
            return {"default": file.read_text()}
        given = config.get("chat_template")
        if isinstance(given, list):
            return {entry["name"]: entry["template"] for entry in given}
        return {"default": given} if given else {}

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, ids: list[int]) -> list[str]:
        return [self._tokenizer.id_to_token(id) or "" for id in ids]

    def chat(self, body: dict) -> list[int]:
        """Token ids of a body with `messages`. RequestError where vLLM refuses."""
        return self.encode(self.render(body), flag(body, "add_special_tokens", False))

    def truncated(self, ids: list[int], body: dict, special: bool, outputs: bool, side: str = "left") -> list[int]:
        """What `truncate_prompt_tokens` leaves of a prompt: -1 stands for the context, less one token if `outputs`
        are asked for. `special`: the tokenizer has added its own tokens, which stay unless the request names a side.
        """
        keep, given = body.get("truncate_prompt_tokens"), body.get("truncation_side")
        if given not in (None, "left", "right"):
            raise RequestError("`truncation_side` must be either 'left' or 'right'.", param="truncation_side")
        if keep is None:
            return ids
        try:
            least = int(keep)
        except (TypeError, ValueError, OverflowError):
            least = -2
        if least < -1 or (isinstance(keep, float) and keep != least):
            raise RequestError(
                "`truncate_prompt_tokens` must be an integer of at least -1", param="truncate_prompt_tokens"
            )
        if self.context_length is not None and least > self.context_length:
            raise RequestError(
                f"truncate_prompt_tokens={least} cannot be greater than max_model_len = {self.context_length}. "
                "Please request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        if least == -1:
            least = len(ids) if self.context_length is None else self.context_length - outputs
        if len(ids) <= least or not least:
            return ids if least else []
        before, after = self._added_around() if special and given is None else (0, 0)
        text, kept = ids[before : len(ids) - after], max(0, least - before - after)
        text = text[len(text) - kept :] if (given or side) == "left" else text[:kept]
        return [*ids[:before], *text, *ids[len(ids) - after :]]

    def _added_around(self) -> tuple[int, int]:
        """How many special tokens the tokenizer puts before and after a text."""
        bare, whole = self.encode("x", False), self.encode("x", True)
        before = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return before, len(whole) - len(bare) - before

    def render(self, body: dict) -> str:
        """The prompt's text."""
        variables = _variables(body)
        variables["tools"] = tools = self._shown(variables["tools"], body.get("tools"))
        go_on = variables.pop("continue_final_message")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        template, takes_parts = self._templates.get(name), self._takes_parts.get(name, False)
        knows_developer = self._knows_developer.get(name, True)
        if source := body.get("chat_template"):
            template = _environment().from_string(source)
            takes_parts, knows_developer = _takes_parts(source), _knows_developer(source)
        if template is None:
            raise RequestError("this model has no chat template: give one in the request, or use /v1/completions")
        messages = conversation(body.get("messages"), takes_parts, self.between_parts)
        if not knows_developer:
            messages = _without_developer(messages)
        if go_on and variables["add_generation_prompt"]:
            raise RequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if go_on:
            messages = _mark_end(messages)
        try:
            text = template.render({**self._special, **variables, "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        return _cut(text) if go_on else text

    def _shown(self, tools: list[dict] | None, given: Any) -> list[dict] | None:
        """Return the tools that the template gets. `given`: what the request has in its own field."""
        return tools


def _knows_developer(template: str) -> bool:
    return "'developer'" in template or '"developer"' in template


def _without_developer(messages: list[dict]) -> list[dict]:
    """For a template that does not name the role: as system messages, all of them merged into one at the front."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    messages = [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    said = [message["content"] for message in messages if message["role"] == "system"]
    texts = [text if isinstance(text, str) else "\n".join(part["text"] for part in text) for text in said]
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in messages if message["role"] != "system")]


def flag(body: dict, name: str, default: bool) -> bool:
    """A field that is true or false, as pydantic reads it: null is neither."""
    value = body.get(name, default)
    if isinstance(value, str):
        value = FLAGS.get(value.lower())
    if value is None or value not in (0, 1):
        raise RequestError(f"`{name}` must be true or false", param=name)
    return bool(value)


def _variables(body: dict) -> dict[str, Any]:
    """What the template gets besides the messages. The request's fields win over variables of its own, but for tools;
    what is null or "auto" is not given."""
    own = body.get("chat_template_kwargs")
    if not isinstance(own, dict | None):
        raise RequestError("`chat_template_kwargs` must be an object", param="chat_template_kwargs")
    own, effort = own or {}, body.get("reasoning_effort")
    said = {
        "documents": body.get("documents"),
        "reasoning_effort": effort,
        "add_generation_prompt": flag(body, "add_generation_prompt", True),
        "continue_final_message": flag(body, "continue_final_message", False),
    }
    if effort is not None and "enable_thinking" not in own:
        said["enable_thinking"] = effort != "none"
    given = own | {name: value for name, value in said.items() if value not in (None, "auto")}
    given = {name: value for name, value in given.items() if value not in (None, "auto")}
    if TAKEN & given.keys() or given.get("return_assistant_tokens_mask"):
        wrong = min(TAKEN & given.keys(), default="return_assistant_tokens_mask")
        raise RequestError(f"got multiple values for keyword argument {wrong!r}", param="chat_template_kwargs")
    # vLLM hands on what is no global name of Jinja's
    given = {name: value for name, value in given.items() if name not in jinja2.defaults.DEFAULT_NAMESPACE}
    # also with tool_choice "none": vLLM leaves tools out only on a flag
    given = {"tools": _tools(body.get("tools")), "documents": None} | given
    for name in ("tools", "documents"):
        items = given[name]
        if items is not None and (not isinstance(items, list) or not all(isinstance(item, dict) for item in items)):
            raise RequestError(f"`{name}` must be a list of objects", param=name)
    return given


def _mark_end(messages: list[dict]) -> list[dict]:
    """A mark after the final message's text, to cut the rendered prompt there."""
    last = dict(messages[-1])
    if isinstance(last.get("content"), list):
        last["content"] = parts = [dict(part) for part in last["content"]]
        texts = [part for part in parts if part.get("type") == "text"]
        if not texts:
            raise RequestError("`continue_final_message` needs a final message with text")
        texts[-1]["text"] += CUT
    else:
        last["content"] = (last.get("content") or "") + CUT
    return [*messages[:-1], last]


def _cut(text: str) -> str:
    """Up to the mark. A template that strips the mark's trailing blank would have stripped the text's as well."""
    at = text.rfind(CUT.rstrip())
    if at < 0:
        raise RequestError(
            "`continue_final_message` is set but the final message does not appear in the chat after "
            "applying the chat template"
        )
    return text[:at] if text.startswith(CUT, at) else text[:at].rstrip()


def _tools(tools: Any) -> list[dict] | None:
    """Tools as vLLM hands them to a template: the fields it knows, in its order, absent ones as null."""
    if tools is None:
        return None
    if (
        not isinstance(tools, list)
        or not tools
        or not all(
            isinstance(tool, dict)
            and isinstance(tool.get("function"), dict)
            and isinstance(tool["function"].get("name"), str)
            for tool in tools
        )
    ):
        raise RequestError("`tools` must be a non-empty list of objects with a named `function`", param="tools")
    return [_tool(tool, tool["function"]) for tool in tools]


def _tool(tool: dict, function: dict) -> dict:
    seen = {name: function.get(name) for name in ("name", "description", "parameters")}
    made = {"type": "function", "function": seen}
    if function.get("strict") is not None:
        seen["strict"] = function["strict"]
    outer = tool.get("defer_loading")
    inner = function.get("defer_loading")
    if inner is not None or outer is not None:
        seen["defer_loading"] = outer if inner is None else inner
    if outer is not None:
        made["defer_loading"] = outer
    return made


def listed(given: Any, name: str) -> list:
    """An optional list of a request."""
    if given is not None and not isinstance(given, list):
        raise RequestError(f"`{name}` must be a list", param=name)
    return given or []


def conversation(messages: Any, takes_parts: bool, between_parts: str = "\n") -> list[dict]:
    """Messages as a template sees them: only the fields vLLM passes on, text or parts, arguments as objects."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("`messages` must be a list with at least one message", param="messages")
    return [_message(message, takes_parts, between_parts) for message in messages]


def _message(message: Any, takes_parts: bool, between_parts: str) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with a `role`", param="messages")
    role, seen = message["role"], {}
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if role == "assistant" and reasoning is not None:
        seen["thinking"] = seen["reasoning"] = seen["reasoning_content"] = reasoning
    parts = _parts(message.get("content"), role == "system")
    texts = [part.get("text", part.get("name")) for part in parts]
    # vLLM drops empty texts, but not empty parts
    as_text = between_parts.join(texts if takes_parts else filter(None, texts))
    has_parts = takes_parts and (role != "tool" or any(part["type"] != "text" for part in parts))
    seen |= {"role": role, "content": parts if has_parts else as_text}
    if role == "assistant" and message.get("tool_calls"):
        seen["tool_calls"] = [_call(call) for call in listed(message["tool_calls"], "tool_calls")]
    if role == "tool" and message.get("tool_call_id") is not None:
        seen["tool_call_id"] = message["tool_call_id"]
    if role == "developer" and message.get("tools") is not None:
        seen["tools"] = message["tools"]
    return seen | {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}


def _parts(content: Any, system: bool) -> list[dict]:
    """A message's content as texts and names of tools. From system text vLLM drops a first line that changes with every
    request."""
    if content is None or isinstance(content, str):
        content = [] if content is None else [content]
    elif not isinstance(content, list):
        raise RequestError("`content` must be text or a list of parts", param="messages")
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "tool_reference":
            name = part.get("name") or part.get("tool_reference")
            if not isinstance(name, str):
                raise RequestError("a `tool_reference` must name a tool", param="messages")
            parts.append({"type": "tool_reference", "name": name})
            continue
        text = _part(part)
        if (
            system
            and text
            and text.startswith("x-anthropic-billing-header")
            and (isinstance(part, str) or part["type"] == "text")
        ):
            text = text.partition("\n")[2] or None
        if text is not None:
            parts.append({"type": "text", "text": text})
    return parts


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal", "thinking"):
        raise RequestError(f"this model takes text only, not a content part of type {kind!r}", param="messages")
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if text is not None and not isinstance(text, str):
        raise RequestError("a content part's text must be a string", param="messages")
    return text


def _call(call: Any) -> dict:
    """A tool call with its arguments as an object; what is no JSON object becomes an empty one."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RequestError("each tool call must be an object with a `function`", param="messages")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}
