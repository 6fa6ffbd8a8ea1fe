"""Request body to Prompt: parse, render, tokenize, hash.

Pure CPU work, no I/O; safe to call from several threads.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import orjson

from cachemap import chain_seed, hash_blocks

from .conversation import Multimodal, bad, conversation, tool_schemas
from .model import load_model
from .prompt import Prompt, PromptError
from .template import ChatTemplate, TemplateError
from .tokenizer import Tokenizer


class Pipeline:
    def __init__(self, model_dir: Path | None, served_name: str, block_size: int, *,
                 chat_template: str | Path | None = None, max_model_len: int | None = None) -> None:
        self.served_name = served_name
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.offload_bytes = 64 * 1024
        self.tokenizer: Tokenizer | None = None
        self._templates: dict[str, ChatTemplate] = {}
        if model_dir is not None:
            files = load_model(model_dir, chat_template)
            self.files = files
            self.tokenizer = Tokenizer(model_dir)
            self._templates = {name: ChatTemplate(source, files.special_tokens)
                               for name, source in files.templates.items()}

    def prepare(self, path: str, body: bytes, headers: Mapping[str, str] | None = None,
                adapters: Collection[str] = ()) -> Prompt:
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return Prompt(path, "", mode="load", note="path not routed by prompt")
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise bad(f"the body is not valid JSON: {error}") from error
        if not isinstance(request, dict):
            raise bad("the body must be a JSON object")
        model = request.get("model")
        if model is not None and not isinstance(model, str):
            raise bad("'model' must be a string", "model")
        prompt = Prompt(path, model or "", stream=bool(request.get("stream")))
        prompt.adapter = model if model in adapters else None
        options = request.get("stream_options")
        prompt.include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        prompt.max_tokens = request.get("max_completion_tokens") or request.get("max_tokens")
        prompt.n = request.get("n") or 1
        prompt.session = (headers or {}).get("x-session-id") or request.get("prompt_cache_key") or request.get("user")
        try:
            if path == "/v1/chat/completions":
                text = self._render(request)
                prompt.rendered_chars = len(text)
                ids = [self._encode(text, bool(request.get("add_special_tokens")))]
            else:
                ids = self._completion(request, prompt)
        except PromptError:
            raise
        except (TemplateError, Multimodal, Exception) as error:
            prompt.mode, prompt.note = "load", f"{type(error).__name__}: {error}"
            prompt.tokens = len(body) // 4
            return prompt
        prompt.token_ids = max(ids, key=len)
        prompt.tokens = sum(len(i) for i in ids) // 4
        limit = self.max_model_len
        if limit is not None and len(prompt.token_ids) // 4 > limit:
            raise PromptError(400, f"the prompt has {len(prompt.token_ids) // 4} tokens, the model's context holds "
                              f"{limit}", param="messages", code="context_length_exceeded")
        seed = chain_seed(self.served_name, self.block_size, prompt.adapter, request.get("cache_salt"))
        prompt.hashes = hash_blocks(prompt.token_ids, self.block_size, seed)
        return prompt

    def _render(self, request: dict[str, Any]) -> str:
        tools = tool_schemas(request.get("tools"))
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError("no chat template")
        variables = dict(request.get("chat_template_kwargs") or {})
        variables["add_generation_prompt"] = request.get("add_generation_prompt", True)
        variables["continue_final_message"] = request.get("continue_final_message", False)
        return template.render(conversation(request.get("messages"), False), tools, variables)

    def _encode(self, text: str, special: bool) -> bytes:
        if self.tokenizer is None:
            raise TemplateError("no tokenizer")
        return self.tokenizer.encode(text, special)

    def _completion(self, request: dict[str, Any], prompt: Prompt) -> list[bytes]:
        from array import array
        value = request.get("prompt")
        special = bool(request.get("add_special_tokens", True))
        if isinstance(value, str):
            prompt.rendered_chars = len(value)
            return [self._encode(value, special)]
        if isinstance(value, list) and value:
            if all(isinstance(v, str) for v in value):
                prompt.rendered_chars = sum(map(len, value))
                return [self._encode(v, special) for v in value]
            if all(isinstance(v, list) for v in value):
                return [array("I", v).tobytes() for v in value]
            if all(type(v) is int for v in value):
                return [array("I", value).tobytes()]
        raise bad("'prompt' must be a string, a list of strings, a list of token ids or a list of those", "prompt")
