"""A kind of engine that there is not, unlike any other in all that a dialect may decide; and one that speaks as vLLM
does."""

import json
import re
from array import array

import zmq.asyncio
from aiohttp import web

from replicas.engines.dialect import ANY_PATH, Sources, Told
from replicas.engines.vllm.versions import version_quirks
from replicas.event_source import EventSource
from replicas.launch.exits import PLAIN
from replicas.metrics import MetricNames
from replicas.problems import Problem, Remedies

PAGE = 16  # tokens


class ToyDialect:
    """Its events are JSON, it counts in pages, and its ranks are shards."""

    id, name = "toy", "the toy engine"
    paths = ("/toy/publishers",)
    health_seconds = 0.0
    metrics = MetricNames(
        prefix="toy_",
        running=(b"toy_busy",),
        waiting=(b"toy_queue",),
        kv_usage=(b"toy_full",),
        prefix_queries=(b"toy_asked",),
        prefix_hits=(b"toy_found",),
        prompted=(b"toy_read",),
        generated=(b"toy_written",),
        started=(b"toy_began",),
        cache_config=b"toy_cache",
        block_size=b"page",
        num_blocks=b"pages",
        rank_tokens=b"tokens",
        prefix_caching=b"reuse",
        rank=b"shard",
    )
    remedies = Remedies(**{name: f"turn the toy's {name} knob" for name in Remedies._fields})
    log = PLAIN
    rank_header, rank_paths = "X-Toy-Shard", ("/v1/completions",)
    chat_token_ids = (b'"toy":{"ids":', b"}")
    aborted = {ANY_PATH: re.compile(b'"toy_cut":true').search}
    transfer = None
    peer_pull = None
    priority_paths, priority_header, priority_header_paths = (), None, ()
    limits_path = "/toy/limits"

    def speaks(self, answers):
        return "toy" in answers["/version"].json()

    def told(self, answers):
        return Told(answers["/version"].json()["version"])

    def event_sources(self, answers, host):
        told = answers[self.paths[0]].json()
        sources = {int(shard): EventSource(f"tcp://{host}:{port}", None, "") for shard, port in told.items()}
        return Sources(sources, {} if sources else {"events": Problem("the toy tells nothing", self.remedies.events)})

    def event_decoder(self, records):
        def decode(payload):
            try:
                told = json.loads(payload)
            except ValueError as error:
                raise records.EventError(str(error)) from error
            tokens = array("I", told["tokens"]).tobytes()
            stored = records.Stored(told["pages"], None, tokens, PAGE, "gpu", None, None, 0, "full_attention")
            return records.Batch(told["at"], [stored], [])

        return decode

    def has_random_hash_seed(self, version):
        return False

    def version_quirks(self, version):
        """As the other engines' here, so that one way of making prompts does for all."""
        return version_quirks("0.33.0")

    def launch_profile(self):
        raise AssertionError("no gateway launches a toy")

    def scheduler_limits(self, told):
        return told


class Fake:
    """A server of two ranks that answers completions. `pages`: what else it answers, by path."""

    def __init__(self, pages: dict):
        self.pages, self.seen, self.answer = pages, [], {}

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/v1/completions":
            self.seen.append(request.headers)
            choice = {"index": 0, "text": "x", "finish_reason": "stop", **self.answer}
            body = {"id": "1", "object": "text_completion", "created": 1, "model": "sim", "choices": [choice]}
            return web.Response(text=json.dumps(body, separators=(",", ":")), content_type="application/json")
        page = self.pages.get(request.path)
        if page is None:
            return web.Response(status=404)
        return web.Response(text=page) if isinstance(page, str) else web.json_response(page)

    async def start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.id = f"127.0.0.1:{self.runner.addresses[0][1]}"
        return f"http://{self.id}"


MODELS = {"data": [{"id": "sim", "parent": None, "max_model_len": 4096}]}


def vllm() -> Fake:
    """With two data-parallel ranks, and events off."""
    series = "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total".split()
    lines = [f'vllm:{name}{{engine="{rank}"}} 0' for name in series for rank in (0, 1)]
    lines += [f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="200",engine="{rank}"}} 1' for rank in (0, 1)]
    return Fake(
        {
            "/health": "",
            "/v1/models": MODELS,
            "/version": {"version": "0.33.0"},
            "/metrics": "\n".join(lines),
            "/kv_event_sources": {},
        }
    )


def toy(ports: list[int]) -> Fake:
    """With two shards that publish on these ports."""
    lines = [
        f'toy_{name}{{shard="{shard}"}} 0' for name in ("busy", "queue", "full", "asked", "found") for shard in (0, 1)
    ]
    lines += [f'toy_cache{{page="{PAGE}",pages="60",tokens="480",shard="{shard}"}} 1' for shard in (0, 1)]
    publishers = {str(shard): port for shard, port in enumerate(ports)}
    return Fake(
        {
            "/health": "",
            "/v1/models": MODELS,
            "/version": {"toy": 7, "version": "7"},
            "/metrics": "\n".join(lines),
            "/toy/publishers": publishers,
        }
    )


class Publisher:
    """One shard's events."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._number = 0

    async def subscribed(self) -> None:
        await self._socket.recv()

    async def store(self, pages: list[int], tokens: list[int]) -> None:
        told = {"at": float(self._number), "pages": pages, "tokens": tokens}
        await self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), json.dumps(told).encode()])
        self._number += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
