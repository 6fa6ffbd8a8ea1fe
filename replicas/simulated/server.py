"""The simulated engine's HTTP server: vLLM's endpoints on aiohttp.

As in vLLM, a stream's response head is sent as soon as the request is accepted, long before its first token; idle
connections are closed after 5 seconds; a client that leaves aborts its request. Streamed tokens are written directly to
the transport: a coroutine per token would cost more than everything else here.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial

import orjson
from aiohttp import HttpVersion11, web

from . import dialects, requests
from .engine import Output
from .faults import Faults
from .metrics import Metrics
from .publisher import Publisher
from .replies import Replies
from .requests import Asked
from .rooms import Prompts, Rooms
from .runner import Generation, Runner
from .tokens import RequestError, Tokens
from .transfers import NotThere, Transfers
from .wires import ROOM, Nixl

VERSION = "0.33.0+simulated"
KEEP_ALIVE = 5.0  # s, as in vLLM's uvicorn
HEAD_BYTES = 2**17  # of a header; uvicorn has no limit, so this is more than a gateway forwards
INLINE_BYTES = 256 << 10  # a body up to this size is rendered and tokenized on the event loop (about 3 ms of prose)
ENGINE_ID = "engine-{}"  # the id by which other engines fetch its prompts, from its port
EMBEDDING = 64  # dimensions of an embedding
log = logging.getLogger(__name__)


def error_body(message: str, type: str, status: int, param: str | None = None) -> dict:
    return {"error": {"message": message, "type": type, "param": param, "code": status}}


def reply_json(data, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


class Server:
    """One engine's endpoints. `adapters` are LoRA names served besides `model`."""

    generates = (
        ("/v1/chat/completions", requests.chat, dialects.Chat, "chatcmpl-"),
        ("/v1/completions", requests.completion, dialects.Completion, "cmpl-"),
        ("/v1/responses", requests.responses, dialects.Responses, "resp_"),
        ("/v1/messages", requests.anthropic, dialects.Messages, "msg_"),
    )

    def __init__(
        self,
        runner: Runner,
        tokens: Tokens,
        replies: Replies,
        metrics: Metrics,
        publisher: Publisher | None,
        model: str,
        root: str,
        adapters: list[str] = (),
        show_cached: bool = True,
        transfers: Transfers | None = None,
        api_key: str | None = None,
        wire: Nixl | None = None,
    ):
        self.context_length = runner.engine.profile.context_length
        self.tokens = tokens.within(self.context_length)
        self.runner, self.replies, self.metrics = runner, replies, metrics
        # adapters: name -> path
        self.publisher, self.model, self.root, self.adapters = publisher, model, root, {name: name for name in adapters}
        self.show_cached, self.transfers, self.wire = show_cached, transfers, wire or Nixl()
        self.rooms = Rooms()
        self.authorization = f"Bearer {api_key}" if api_key else None
        self.faults = Faults(runner, publisher)
        self._load = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        for path, ask, dialect, prefix in self.generates:
            app.router.add_post(path, partial(self._generate, ask, dialect, prefix))
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        app.router.add_get("/metrics", self._metrics)
        self._tell(app.router)
        app.router.add_route("*", "/faults", self._faults)
        app.router.add_get("/held", self._held)
        if self.transfers is not None:
            app.router.add_post("/kv/{name}", self._hand_over)
            app.router.add_post("/rooms/{name}", self._meet)
            app.router.add_get("/rooms", self._rooms_open)
            if self.wire.meets:
                app.router.add_get("/query", self._engine_ids)
        return app

    def _tell(self, router: web.UrlDispatcher) -> None:
        """Add the endpoints that report the engine's state, and the cache's reset."""
        for path in ("/health", "/ping"):
            router.add_get(path, self._empty)
        router.add_get("/version", self._version)
        router.add_get("/load", self._server_load)
        router.add_get("/kv_event_sources", self._sources)
        router.add_post("/reset_prefix_cache", self._reset)

    @web.middleware
    async def _guard(self, request: web.Request, handler) -> web.StreamResponse:
        if request.path != "/faults":
            await self.faults.hang()
        if self.authorization not in (None, request.headers.get("Authorization")) and request.path != "/health":
            return reply_json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except RequestError as error:
            return reply_json(error_body(str(error), error.type, error.status, error.param), error.status)
        except web.HTTPException as error:
            made = reply_json(error_body(error.reason, error.reason.replace(" ", ""), error.status), error.status)
            made.headers.update({name: value for name, value in error.headers.items() if name == "Allow"})
            return made
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return reply_json(error_body("Internal server error", "InternalServerError", 500), 500)

    # ---- generation

    async def _generate(self, ask: Callable, dialect: type, prefix: str, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        raw = await request.read()
        self._fail_on_order(request)
        body = requests.parse(raw)
        passed_on = await self.wire.read(request, body) if self.transfers is not None else None
        adapter = self._adapter(body.get("model"))
        asked = await self._asked(ask, body, len(raw))
        failure = self._failure(asked)
        if failure is not None and not asked.stream:
            raise failure
        given = request.headers.get("x-request-id", "").encode(errors="surrogateescape").decode("latin-1")
        id = prefix + (given or uuid.uuid4().hex)
        generations = self._generations(id, asked, adapter, arrived) if failure is None else []
        if passed_on and passed_on.get("do_remote_prefill"):
            await self._receive(passed_on, generations)
        answer = dialect(id, adapter or self.model, body, self.show_cached, asked.n)
        self._load += 1
        try:
            if asked.stream:
                return await self._stream(request, answer, generations, failure)
            if passed_on and passed_on.get("do_remote_decode") and ROOM in passed_on:
                await self._compute_for(passed_on, generations)
            else:
                await self._finish(generations)
            said = answer.whole(generations)
            if self.transfers is not None and not self.wire.meets:
                said["kv_transfer_params"] = self._keep(request, passed_on, generations)
            return reply_json(said)
        finally:
            self._load -= 1
            for generation in generations:
                self.runner.abort(generation)

    async def _compute_for(self, parameters: dict, generations: list[Generation]) -> None:
        """Compute prompts for the engine that waits, or will wait, in the room that `parameters` name.

        A sequence that ends by itself is not kept.
        """

        async def compute() -> Prompts | None:
            await self._finish(generations)
            kept = all(one.reason == "length" for one in generations)
            return [(len(one.prompt), one.cached) for one in generations] if kept else None

        await self.rooms.compute(parameters[ROOM], compute)

    async def _receive(self, parameters: dict, generations: list[Generation]) -> None:
        try:
            if ROOM in parameters:
                if parameters.get("engine") not in (None, ENGINE_ID.format(parameters["at"].rpartition(":")[2])):
                    raise NotThere
                found = await self.rooms.fetch(parameters["at"], parameters[ROOM])
                for generation, (tokens, cached) in zip(generations, found, strict=True):
                    generation.received, generation.cached_there = tokens, cached
                return
            for generation in generations:
                generation.received = await self.transfers.fetch(parameters)
                generation.cached_there = parameters.get("remote_prefill_cached_tokens")
        except NotThere:
            raise RequestError("Internal server error", 500, "InternalServerError") from None

    def _keep(self, request: web.Request, passed_on: dict | None, generations: list[Generation]) -> dict | None:
        if not passed_on or not passed_on.get("do_remote_decode") or request.transport is None:
            return None
        tokens = len(generations[0].prompt)
        blocks = -(-tokens // self.runner.engine.profile.block_size)
        address = request.transport.get_extra_info("sockname")[:2]
        return self.transfers.keep(tokens, blocks, address, generations[0].cached)

    async def _meet(self, request: web.Request) -> web.Response:
        """Let another engine wait for a prompt that is being computed, or is going to be."""
        try:
            return reply_json(await self.rooms.hand_over(request.match_info["name"]))
        except NotThere:
            return reply_json({"error": "nobody computes it"}, 404)

    async def _rooms_open(self, request: web.Request) -> web.Response:
        return reply_json({"open": self.rooms.open})

    async def _engine_ids(self, request: web.Request) -> web.Response:
        port = request.transport.get_extra_info("sockname")[1] if request.transport is not None else 0
        return reply_json({"0": {"engine_id": ENGINE_ID.format(port), "worker_addr": {}}})

    async def _hand_over(self, request: web.Request) -> web.Response:
        if request.query.get("kind", self.transfers.kind) != self.transfers.kind:
            return reply_json({"error": "the engines' compatibility hashes differ"}, 409)
        tokens = self.transfers.hand_over(request.match_info["name"])
        return reply_json({"tokens": tokens}, 200 if tokens is not None else 404)

    def _fail_on_order(self, request: web.Request) -> None:
        if self.faults.happens("refuse"):
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError
        if self.faults.happens("error_503"):
            raise RequestError(
                "The engine is currently busy and cannot accept new requests. Please try again later.",
                503,
                "Service Unavailable",
            )
        if self.faults.happens("error_500"):
            raise RequestError("Internal server error", 500, "InternalServerError")

    def _failure(self, asked: Asked) -> RequestError | None:
        """Return what fails once a stream has its 200: vLLM checks a prompt's ids no sooner."""
        if (asked.stream and self.faults.happens("error_stream")) or self.faults.strikes():
            return RequestError("Internal server error", 500, "InternalServerError")
        if not asked.text:
            worst = max(map(max, asked.prompts))
            if worst >= self.tokens.vocab_size:
                return RequestError(f"Token id {worst} is out of vocabulary")
        return None

    def _adapter(self, model) -> str | None:
        """Return an adapter's name, or None for the base model."""
        if model is None or model == self.model:
            return None
        if model in self.adapters:
            return model
        raise RequestError(f"The model `{model}` does not exist.", 404, "NotFoundError", "model")

    async def _asked(self, ask: Callable, body: dict, size: int) -> Asked:
        try:
            if size <= INLINE_BYTES:
                return ask(body, self.tokens)
            return await asyncio.get_running_loop().run_in_executor(None, ask, body, self.tokens)
        except (AttributeError, KeyError, TypeError) as error:
            raise RequestError(f"the body has a field of a wrong type: {error}") from None

    def _generations(self, id: str, asked: Asked, adapter: str | None, arrived: float) -> list[Generation]:
        made, most = [], asked.max_tokens
        if most is not None and most > self.context_length:
            raise RequestError(
                f"{asked.limit}={most} cannot be greater than max_model_len={self.context_length}. Please request "
                "fewer output tokens.",
                param=asked.limit,
            )
        for prompt in asked.prompts:
            room = self.context_length - len(prompt)
            if room < 1 or (not asked.clip and asked.max_tokens is not None and asked.max_tokens > room):
                wanted = f" and asked for {asked.max_tokens} tokens of output" if asked.max_tokens is not None else ""
                raise RequestError(
                    f"This model's maximum context length is {self.context_length} tokens. However, your request has "
                    f"{len(prompt)} input tokens{wanted}. Please reduce the length of the input messages.",
                    param="input_tokens",
                )
            for _ in range(asked.n):
                generation = Generation(
                    f"{id}-{len(made)}-{uuid.uuid4().hex[:8]}",
                    prompt,
                    adapter,
                    asked.salt,
                    arrived,
                    asked.text,
                    asked.reads_cache,
                )
                generation.priority = asked.priority
                if adapter and self.adapters.get(adapter, adapter) != adapter:
                    generation.weights = f"{adapter}\0{self.adapters[adapter]}"
                generation.plan(
                    self.replies,
                    self.tokens.eos_id,
                    asked.max_tokens or room,
                    room,
                    asked.ignore_eos,
                    asked.min_tokens,
                    asked.stop,
                )
                made.append(generation)
        return made

    async def _finish(self, generations: list[Generation]) -> None:
        """Run generations to their end without reporting their tokens."""
        done, left = asyncio.get_running_loop().create_future(), len(generations)

        def tell(generation: Generation, output: Output) -> None:
            nonlocal left
            generation.sent += output.tokens
            left -= output.finished is not None
            if not left and not done.done():
                done.set_result(None)

        for generation in generations:
            generation.tell = tell
            self.runner.submit(generation)
        await done

    async def _stream(
        self, request: web.Request, answer, generations: list[Generation], failure: RequestError | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        chunked = request.version >= HttpVersion11
        if chunked:
            response.enable_chunked_encoding()
        await response.prepare(request)
        transport, breaks = request.transport, self.faults.happens("die_mid_stream")
        if transport is None:  # the client left while the head was sent
            return response
        if failure is not None:
            await response.write(
                answer.announce() + answer.error(error_body(str(failure), failure.type, failure.status))
            )
            await response.write_eof()
            return response
        fails = self.faults.happens("error_mid_stream")
        if announced := answer.announce():
            await response.write(announced)
        done, left = asyncio.get_running_loop().create_future(), len(generations)
        index_of = {id(generation): index for index, generation in enumerate(generations)}

        def tell(generation: Generation, output: Output) -> None:
            nonlocal left
            if done.done():  # it failed, and the rest is not aborted yet
                return
            start, index = generation.sent, index_of[id(generation)]
            generation.sent = end = start + output.tokens
            told = [answer.begin(generation, index)] if start == 0 else []
            told.append(answer.tokens(generation, index, start, end))
            left -= output.finished is not None
            if fails and end > 1 and not done.done():
                left = 0
                told.append(answer.error(error_body("Internal server error", "InternalServerError", 500)))
                done.set_result(None)
            elif not left:
                told.append(answer.close(generations))
                if not done.done():
                    done.set_result(None)
            if not transport.is_closing():  # one write per step: the system call is most of a token's cost
                transport.write(
                    b"".join([b"%x\r\n%b\r\n" % (len(data), data) for data in told if data] if chunked else told)
                )
            if breaks and end > 1:
                transport.abort()

        for generation in generations:
            generation.tell = tell
            self.runner.submit(generation)
        await done
        await response.write_eof()
        return response

    # ---- the rest

    async def _embeddings(self, request: web.Request) -> web.Response:
        arrived = time.monotonic()
        raw = await request.read()
        self._fail_on_order(request)
        body = requests.parse(raw)
        adapter = self._adapter(body.get("model"))
        asked = await self._asked(requests.embeddings, body, len(raw))
        id = "embd-" + uuid.uuid4().hex
        generations = self._generations(id, asked, adapter, arrived)
        self._load += 1
        try:
            await self._finish(generations)
        finally:
            self._load -= 1
            for generation in generations:
                self.runner.abort(generation)
        return reply_json(
            dialects.embeddings(id, adapter or self.model, generations, EMBEDDING, body.get("encoding_format"))
        )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = requests.parse(await request.read())
        self._adapter(body.get("model"))
        asked = await self._asked(requests.anthropic, {"max_tokens": 1, **body}, 0)
        return reply_json({"input_tokens": len(asked.prompts[0])})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = requests.parse(await request.read())
        self._adapter(body.get("model"))
        if "messages" in body:
            ids = self.tokens.chat(body)
        elif isinstance(body.get("prompt"), str):
            ids = self.tokens.encode(body["prompt"], body.get("add_special_tokens") is not False)
        else:
            raise RequestError("`prompt` must be text, or give `messages`", param="prompt")
        strings = self.tokens.token_strings(ids) if body.get("return_token_strs") else None
        return reply_json(
            {"count": len(ids), "max_model_len": self.context_length, "tokens": ids, "token_strs": strings}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = requests.parse(await request.read())
        self._adapter(body.get("model"))
        (ids,) = requests.texts([body.get("tokens")], self.tokens, False, "tokens")
        return reply_json({"prompt": self.tokens.decode(ids)})

    async def _models(self, request: web.Request) -> web.Response:
        def card(name: str, root: str, parent: str | None) -> dict:
            return {
                "id": name,
                "object": "model",
                "created": self.runner.started,
                "owned_by": "hitherto",
                "root": root,
                "parent": parent,
                "max_model_len": self.context_length if parent is None else None,
                "permission": [],
            }

        cards = [
            card(self.model, self.root, None),
            *(card(name, path, self.model) for name, path in self.adapters.items()),
        ]
        return reply_json({"object": "list", "data": cards})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Load an adapter, as vLLM does with VLLM_ALLOW_RUNTIME_LORA_UPDATING; here any name and path are valid."""
        body = await request.read()
        name, given = self._adapter_named(body), requests.parse(body)
        if name == self.model or (name in self.adapters and not given.get("load_inplace")):
            raise RequestError(f"The lora adapter {name!r} has already been loaded.", 400, "InvalidUserInput")
        self.adapters[name] = given.get("lora_path") or name
        return web.Response(text=f"Success: LoRA adapter {name!r} added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = self._adapter_named(await request.read())
        if name not in self.adapters:
            raise RequestError(f"The lora adapter {name!r} cannot be found.", 404, "NotFoundError")
        del self.adapters[name]
        return web.Response(text=f"Success: LoRA adapter {name!r} removed successfully.")

    def _adapter_named(self, body: bytes) -> str:
        name = requests.parse(body).get("lora_name")
        if not isinstance(name, str) or not name:
            raise RequestError("lora_name must be a string that is not empty", 400, "InvalidUserInput", "lora_name")
        return name

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.text(), headers={"content-type": "text/plain; version=0.0.4"})

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return reply_json({"version": VERSION})

    async def _server_load(self, request: web.Request) -> web.Response:
        return reply_json({"server_load": self._load})

    async def _sources(self, request: web.Request) -> web.Response:
        return reply_json({"0": self.publisher.source()} if self.publisher else {})

    async def _reset(self, request: web.Request) -> web.Response:
        if not self.runner.engine.reset_prefix_cache(request.query.get("reset_external") in ("true", "1")):
            return reply_json(error_body("requests are running: the prefix cache is not reset", "Conflict", 409), 409)
        return web.Response()

    async def _held(self, request: web.Request) -> web.Response:
        """Return the keys of all blocks in the GPU cache, as events name them, to check a gateway's map."""
        return reply_json({"keys": self.runner.engine.cached_keys})

    async def _faults(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            return reply_json(self.faults.order(requests.parse(await request.read())))
        return reply_json(self.faults.state())
