"""What is otherwise where the simulated engine speaks as TensorRT-LLM's trtllm-serve does: its series are below
/prometheus, and its events are handed out, each once, to whoever posts to /kv_cache_events.

Read in TensorRT-LLM's sources. Unlike there, a block is found from its first copy on, no part of a block is found, and
errors have the form that vLLM gives them.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator

from aiohttp import web

from . import requests
from .engine import Cleared, Removed, Stored
from .metrics import Metrics
from .server import Server, reply_json

VERSION = "1.3.0rc9"
KEPT = 16_384  # event_buffer_max_size


class TensorrtServer(Server):
    def _tell(self, router: web.UrlDispatcher) -> None:
        for path in ("/health", "/health_generate"):
            router.add_get(path, self._empty)
        router.add_get("/version", self._version)
        router.add_get("/prometheus/metrics", self._metrics)
        router.add_post("/kv_cache_events", self._events)
        router.add_post("/_internal/tokenize", self._tokenize_text)

    def app(self) -> web.Application:
        """Without the endpoints that it does not have."""
        made = super().app()
        made.middlewares.append(_only_its_own)
        return made

    async def _version(self, request: web.Request) -> web.Response:
        return reply_json({"version": VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "created": self.runner.started, "owned_by": "tensorrt_llm"}
        return reply_json({"object": "list", "data": [card]})

    async def _events(self, request: web.Request) -> web.Response:
        return reply_json(self.publisher.taken() if self.publisher is not None else [])

    async def _tokenize_text(self, request: web.Request) -> web.Response:
        body = requests.parse(await request.read())
        if not isinstance(body.get("prompt"), str) or body.keys() - {"model", "prompt"}:
            raise requests.RequestError("`prompt` must be text, and nothing beside it but `model`")
        ids = self.tokens.encode(body["prompt"], True)
        return reply_json({"count": len(ids), "tokens": ids})


@web.middleware
async def _only_its_own(request: web.Request, handler) -> web.StreamResponse:
    if request.path == "/metrics":  # of iterations, and none is kept
        return reply_json([])
    if request.path in ("/tokenize", "/detokenize"):
        raise web.HTTPNotFound
    return await handler(request)


class TensorrtMetrics(Metrics):
    """As with return_perf_metrics."""

    def text(self) -> str:
        labels, lines = self._labels.replace('engine="0",', ""), []
        for kind, name, value in self._all():
            lines += (f"# TYPE trtllm_{name} {kind}", f"trtllm_{name}{{{labels}}} {float(value)}")
        return "\n".join(lines) + "\n"

    def _all(self) -> Iterator[tuple[str, str, float]]:
        engine, profile, counters = self._engine, self._engine.profile, self._engine.counters
        yield "gauge", "num_requests_running", engine.running
        yield "gauge", "num_requests_waiting", engine.waiting
        yield "gauge", "kv_cache_utilization", engine.kv_usage
        yield "gauge", "kv_cache_max_blocks", profile.num_blocks
        yield "gauge", "kv_cache_tokens_per_block", profile.block_size
        yield "counter", "prompt_tokens_total", counters.prompt_tokens
        yield "counter", "prompt_cached_tokens_total", counters.prefix_hits
        yield "counter", "generation_tokens_total", counters.generated_tokens


class EventBuffer:
    """In the place of a `Publisher`: what nobody has fetched yet. `drop`: so many batches are lost; `mute`: nothing is
    told."""

    topic, port, replay_port = "", 0, 0

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.sequence = 0  # the next event's number
        self.drop = self.swap = 0
        self.mute = False
        self._kept: deque[dict] = deque(maxlen=KEPT)
        self._copies: Counter[int] = Counter()  # of each block, of which the tree has one
        self._told([{"type": "created", "num_blocks_per_cache_level": [0, 0]}])

    def publish(self, events: list[Stored | Removed | Cleared], tokens_of) -> None:
        if self.mute:
            return
        told = [one for event in events for one in self._as_json(event, tokens_of)]
        if self.drop:
            self.drop -= 1
            self.sequence += len(told)
        else:
            self._told(told)

    def taken(self) -> list[dict]:
        kept = list(self._kept)
        self._kept.clear()
        return kept

    async def serve_replay(self) -> None:
        """There is none."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Nothing is open."""

    def _told(self, events: list[dict]) -> None:
        for data in events:
            self._kept.append({"event_id": self.sequence, "data": data, "window_size": 1 << 20})
            self.sequence += 1

    def _as_json(self, event: Stored | Removed | Cleared, tokens_of) -> Iterator[dict]:
        if type(event) is Cleared:
            gone, self._copies = list(self._copies), Counter()
            if gone:
                yield {"type": "removed", "block_hashes": gone}
        elif type(event) is Removed:
            gone = [key for key in event.keys if self._has_lost_last(key)]
            if gone:
                yield {"type": "removed", "block_hashes": gone}
        else:
            yield from self._stored(event, tokens_of(event.request.owner)[0])

    def _has_lost_last(self, key: int) -> bool:
        self._copies[key] -= 1
        if self._copies[key] > 0:
            return False
        del self._copies[key]
        return True

    def _stored(self, event: Stored, ids) -> Iterator[dict]:
        parent, run, size = event.parent, [], self.block_size
        for at, key in enumerate(event.keys, event.start):
            self._copies[key] += 1
            if self._copies[key] == 1:
                tokens = [
                    {"type": "unique_token", "token_id": one, "token_extra_id": 0}
                    for one in ids[at * size : (at + 1) * size].tolist()
                ]
                run.append(
                    {"type": "stored_block", "block_hash": key, "tokens": tokens, "cache_level": 0, "priority": 35}
                )
                continue
            if run:
                yield {"type": "stored", "parent_hash": parent, "blocks": run}
            parent, run = key, []
        if run:
            yield {"type": "stored", "parent_hash": parent, "blocks": run}
