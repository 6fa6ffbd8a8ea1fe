"""`python -m tests.gateway.sglang_engine`: a simulated engine that looks like SGLang to a gateway.

It describes itself in /server_info, its metrics have other names, and its events are of pages, each of which has one
copy. Read in SGLang 0.5.23. Its radix tree finds a prompt to the page, so with pages of one token (its default, and
here) to the token, but for the last one. Unlike there, an answer's tokens are found while it is still being written,
errors have the form that vLLM gives them, and eviction goes page by page.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from replicas.simulated import cli, dialects, metrics, publisher, requests, server, tokens
from replicas.simulated.engine import Cleared, Removed, Stored
from replicas.simulated.metrics import Metrics
from replicas.simulated.profile import load_profile
from replicas.simulated.publisher import Publisher
from replicas.simulated.requests import Asked
from replicas.simulated.runner import Generation
from replicas.simulated.server import Server, reply_json
from replicas.simulated.tokens import Tokens

VERSION = "0.5.23"
HEALTH_SECONDS = 1.0  # it looks once a second whether anything was computed since it was asked


class SglangTokens(Tokens):
    """Chat templates filled as SGLang fills them: tools keep the client's order of keys."""

    between_parts = " "

    def tools(self, given: Any) -> list[dict] | None:
        if (shown := super().tools(given)) is None:
            return None
        return [_as_given(tool, wrote["function"]) for tool, wrote in zip(shown, given, strict=True)]


def _as_given(tool: dict, wrote: dict) -> dict:
    function = tool["function"]
    ordered = {key: function[key] for key in (*wrote, *function) if key in function}
    return {"type": "function", "function": ordered, "defer_loading": tool.get("defer_loading")}


class Chat(dialects.Chat):
    """The prompt's ids are told with each choice."""

    def _choice(self, generation: Generation, index: int, start: int = 0, end: int | None = None) -> dict:
        choice = super()._choice(generation, index, start, end)
        return choice | self._prompt(generation) if end is None else choice

    def whole(self, generations: list[Generation]) -> dict:
        return {name: value for name, value in super().whole(generations).items() if name != "prompt_token_ids"}


def chat(body: dict, tokens) -> Asked:
    """Ids stand beside the messages; where they are, those are not read."""
    ids = body.get("input_ids")
    given = {"prompt_token_ids": ids} if ids is not None else None
    return requests.chat({**body, "kv_transfer_params": given}, tokens)


class SglangServer(Server):
    generates = (("/v1/chat/completions", chat, Chat, "chatcmpl-"), *Server.generates[1:])

    def _tell(self, router: web.UrlDispatcher) -> None:
        for path in ("/health", "/health_generate"):
            router.add_get(path, self._health)
        for path in ("/server_info", "/get_server_info"):
            router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            router.add_get(path, self._model_info)
        router.add_post("/v1/tokenize", self._tokenize)
        router.add_post("/flush_cache", self._reset)

    async def _health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(HEALTH_SECONDS)
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return reply_json({"model_path": self.root, "served_model_name": self.model, "is_generation": True})

    async def _server_info(self, request: web.Request) -> web.Response:
        profile, publisher = self.runner.engine.profile, self.publisher
        told = {
            "model_path": self.root,
            "served_model_name": self.model,
            "context_length": self.context_length,
            "page_size": profile.block_size,
            "dp_size": 1,
            "disable_radix_cache": False,
            "enable_cache_report": self.show_cached,
            "max_running_requests": profile.max_num_seqs,
            "chunked_prefill_size": profile.max_num_batched_tokens,
            "max_total_num_tokens": profile.num_blocks * profile.block_size,
            "version": VERSION,
            "kv_events": None,
        }
        if publisher is not None:
            told["kv_events"] = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": publisher.port,
                "topic": "",
                "block_size": profile.block_size,
                "dp_size": 1,
                "replay_endpoint_port_base": publisher.replay_port,
            }
        return reply_json(told)


class SglangMetrics(Metrics):
    """As with --enable-metrics. It tells nothing of the process."""

    def text(self) -> str:
        labels, lines = self._labels.replace('engine="0",', 'engine_type="unified",tp_rank="0",'), []
        for kind, name, more, value in self._all():
            lines += (f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{labels}{more}}} {float(value)}")
        return "\n".join(lines) + "\n"

    def _all(self) -> Iterator[tuple[str, str, str, float]]:
        engine, profile, counters = self._engine, self._engine.profile, self._engine.counters
        yield "gauge", "num_running_reqs", "", engine.running
        yield "gauge", "num_queue_reqs", "", engine.waiting
        yield "gauge", "token_usage", "", engine.kv_usage
        yield "gauge", "max_total_num_tokens", "", profile.num_blocks * profile.block_size
        yield "gauge", "page_size", "", profile.block_size
        yield "gauge", "num_pages", "", profile.num_blocks
        yield "counter", "prompt_tokens_total", "", counters.prompt_tokens
        yield "counter", "cached_tokens_total", ',cache_source="device"', counters.prefix_hits
        yield "counter", "generation_tokens_total", "", counters.generated_tokens


class PagePublisher(Publisher):
    """Publishes events of pages; those that follow on are in one event."""

    def __init__(self, *args):
        super().__init__(*args)
        self._copies: Counter[int] = Counter()  # of each page, of which the tree has one

    def _told(self, events: list[Stored | Removed | Cleared], tokens_of) -> list:
        told: list = []
        for event in events:
            if type(event) is Cleared:
                self._copies.clear()
                told.append({"type": "AllBlocksCleared"})
            elif type(event) is Removed:
                told += self._gone(event.keys)
            else:
                told += self._new(event, *tokens_of(event.request.owner))
        return told

    def _gone(self, keys: list[int]) -> list:
        gone = []
        for key in keys:
            self._copies[key] -= 1
            if self._copies[key] <= 0:
                del self._copies[key]
                gone.append(_signed(key))
        return [{"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}] if gone else []

    def _new(self, event: Stored, ids, adapter=None, adapter_id=None, salt=None) -> list:
        told, run, size = [], [], self.block_size
        parents = [event.parent, *event.keys]

        def end() -> None:
            if run:
                start = event.start + run[0]
                tokens = ids[start * size : (start + len(run)) * size].tolist()
                keys, above = [_signed(event.keys[at]) for at in run], parents[run[0]]
                parent = _signed(above) if above is not None else None
                told.append(self._stored(keys, parent, tokens, adapter, salt))
                run.clear()

        for at, key in enumerate(event.keys):
            self._copies[key] += 1
            if self._copies[key] > 1:
                end()
                continue
            run.append(at)
        end()
        return told

    def _stored(self, keys: list[int], parent: int | None, tokens: list[int], adapter: str | None, salt: str | None):
        told = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": parent, "token_ids": tokens,
                "block_size": self.block_size, "lora_id": None, "medium": "GPU"}  # fmt: skip
        more = {"cache_salt": salt, "lora_name": adapter}
        return told | {name: value for name, value in more.items() if value is not None}


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def take_place() -> None:
    """Let the simulated engine's command line start these in place of vLLM's."""
    tokens.Tokens, publisher.Publisher = SglangTokens, PagePublisher
    metrics.Metrics, server.Server = SglangMetrics, SglangServer


def flags(given: Sequence[str]) -> list[str]:
    """Return the flags with pages of one token and as much memory as the profile has, unless they say otherwise."""
    profile = load_profile("cpu-tiny")
    return ["--block-size", "1", "--num-blocks", str(profile.num_blocks * profile.block_size), *given]


def main(argv: Sequence[str]) -> int:
    take_place()
    return cli.main(flags(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
