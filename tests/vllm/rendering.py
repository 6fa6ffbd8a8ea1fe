"""Run by vLLM's own Python: what its servers make of request bodies, by its own serving classes, without an engine.

    rendering.py JOBS RESULTS

JOBS has a line of JSON for each model folder, {"folder": ..., "chat_template": a file or null, "bodies": [[path, body],
...]}. RESULTS gets a line for each: what became of its bodies, {"ids": [...]} or {"refused": why}; of those with media
also "keys", for each block of SIZE tokens what it covers besides them.
"""

import asyncio
import gc
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.serving import BaseModelPath, OpenAIModelRegistry
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers.registry import cached_get_tokenizer
from vllm.v1.core import kv_cache_utils

NAME = "tiny"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
SIZE = 16


class Serving:
    """What `vllm serve --enable-auto-tool-choice --tool-call-parser hermes` builds to make prompts."""

    def __init__(self, folder: str, chat_template: str | None) -> None:
        own_code = any(Path(folder).glob("tokenization_*.py"))
        config = AsyncEngineArgs(
            model=folder, dtype="bfloat16", enforce_eager=True, trust_remote_code=own_code
        ).create_model_config()
        template = Path(chat_template).read_text(encoding="utf-8") if chat_template is not None else None
        self._online = OnlineRenderer(
            config,
            renderer_from_config(VllmConfig(model_config=config)),
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="openai" if config.hf_config.model_type == "gpt_oss" else "hermes",
        )
        self._render = ServingRender(
            OpenAIModelRegistry(config, [BaseModelPath(name=NAME, model_path=folder)]), self._online
        )
        self._messages = object.__new__(AnthropicServingMessages)  # all of it that concerns prompts needs no engine
        self._messages.online_renderer, self._messages.model_config = self._online, config
        self._messages._disabled_thinking_effort = None
        if hasattr(AnthropicServingMessages, "_should_merge_inline_system"):  # since 0.31
            self._merge = AnthropicServingMessages._should_merge_inline_system(self._online)
        else:
            self._merge = AnthropicServingMessages._detect_merge_inline_system(template)
        self._media = _taken_aside()

    async def render(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": NAME, **body}
        self._media.clear()
        try:
            made = await self._rendered(path, body)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"[:300]}
        if isinstance(made, list):
            made = max(made, key=lambda one: len(one.token_ids))
        ids = getattr(made, "token_ids", None)
        if ids is None:
            return {"refused": str(made)[:300]}
        media = self._media.pop() if self._media else getattr(made, "features", None)
        return {"ids": list(ids)} | ({"keys": _keys(media, len(ids), body.get("cache_salt"))} if media else {})

    async def _rendered(self, path: str, body: dict[str, Any]) -> Any:
        if path == COMPLETIONS:
            return await self._render.render_completion_request(CompletionRequest.model_validate(body))
        if path == RESPONSES:  # since 0.30 or so there is a way to render them; before, only an engine does
            return await self._render.render_responses_request(ResponsesRequest.model_validate(body))
        if path == CHAT:
            request = ChatCompletionRequest.model_validate(body)
        else:
            request = await self._as_chat(AnthropicMessagesRequest.model_validate(body))
        return await self._render.render_chat_request(request)

    async def _as_chat(self, request: AnthropicMessagesRequest) -> ChatCompletionRequest:
        """As `create_messages` does it."""
        serving = self._messages
        if not hasattr(serving, "to_chat_completion_request"):  # before 0.31
            return serving._convert_anthropic_to_openai_request(request, merge_inline_system=self._merge)
        more = {}
        if hasattr(serving, "_get_disabled_thinking_effort"):
            disabled = request.thinking is not None and request.thinking.type == "disabled"
            more["disabled_thinking_effort"] = await serving._get_disabled_thinking_effort() if disabled else "none"
        return serving.to_chat_completion_request(request, merge_inline_system=self._merge, **more)


def _taken_aside() -> list[Any]:
    """A list that gets the media of each prompt that is made, in place of the answer. Images of Gemma 3 that follow
    each other share a token. Since 0.32 or so a server that renders prompts for others refuses to answer with such
    ones; a server that makes a prompt for itself does not check."""
    found: list[Any] = []
    with suppress(ImportError):
        from vllm.entrypoints.scale_out.token_in_token_out import mm_features

        mm_features.MultiModalFeatures = lambda **fields: found.append(SimpleNamespace(**fields))
    return found


def _keys(media: Any, tokens: int, salt: str | None) -> list[Any]:
    """Per block of SIZE tokens, what events tell of it besides them, by the engine's own rule."""
    items = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=place.offset, length=place.length))
        for kind, names in media.mm_hashes.items()
        for name, place in zip(names, media.mm_placeholders[kind], strict=True)
    ]
    items.sort(key=lambda item: item.mm_position.offset)
    request = SimpleNamespace(mm_features=items, lora_request=None, cache_salt=salt, prompt_embeds=None)
    keys, at = [], 0
    for start in range(0, tokens - SIZE + 1, SIZE):
        extra, at = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + SIZE, at)
        keys.append(extra)
    told = getattr(kv_cache_utils, "to_event_extra_keys", list)  # before 0.32 or so keys are told as they are
    return told(keys) or [None] * len(keys)


async def main(jobs: str, results: str) -> None:
    gc.freeze()  # what was imported is nothing to be looked through again and again
    with open(jobs, encoding="utf-8") as asked, open(results, "w", encoding="utf-8") as told:
        for line in asked:
            job = json.loads(line)
            serving = Serving(job["folder"], job["chat_template"])
            print(json.dumps([await serving.render(path, body) for path, body in job["bodies"]]), file=told)
            cached_get_tokenizer.cache_clear()  # a tokenizer of each folder would stay in memory
            gc.collect()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
