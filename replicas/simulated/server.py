"""The simulated engine's HTTP server: vLLM's endpoints on aiohttp.

As in vLLM, a stream's response head is sent as soon as the request is accepted, long before its first token; idle
connections are closed after 5 seconds; a client that leaves aborts its request. Streamed tokens are written directly to
the transport: a coroutine for each token would cost more than everything else in this module.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial

import orjson
from aiohttp import HttpVersion11, web

from . import dialects, requests
from .engine import Output
from .faults import Faults
from .replies import Replies
from .requests import Asked
from .runner import Generation, Runner
from .tokens import RequestError, Tokens
from .transfers import NotThere, Prompts, Transfers, engine_id

VERSION = "0.33.0+simulated"
KEEP_ALIVE = 5.0  # s, as in vLLM's uvicorn
HEAD_BYTES = 2**17  # the most bytes of a header; uvicorn has no limit, so this is more than a gateway forwards
INLINE_BYTES = 256 << 10  # a body up to this size is rendered and tokenized on the event loop (about 3 ms of prose)
EMBEDDING = 64  # dimensions of an embedding
log = logging.getLogger(__name__)


def failed() -> RequestError:
    return RequestError("Internal server error", 500, "InternalServerError")


def reply_json(data, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


class Server:
    """One engine's HTTP endpoints.

    `model`: the served name; `root`: the model's folder; `adapters`: names of LoRA adapters that are served too.
    `show_cached`: usage has the number of cached tokens. `api_key`: required on all paths but /health.
    """

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
        model: str,
        root: str,
        adapters: list[str] = (),
        show_cached: bool = True,
        transfers: Transfers | None = None,
        api_key: str | None = None,
    ):
        self.context_length = runner.engine.profile.context_length
        self.tokens, self.runner, self.replies = tokens.within(self.context_length), runner, replies
        self.publisher, self.faults = runner.publisher, runner.faults
        self.model, self.root, self.adapters = model, root, {name: name for name in adapters}  # name -> path
        self.show_cached, self.transfers = show_cached, transfers or Transfers()
        self.authorization = f"Bearer {api_key}" if api_key else None
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
        if self.transfers.wire:
            app.router.add_post("/kv/{name}", self._hand_over)
            app.router.add_get("/kv", self._kept)
            if self.transfers.meets:
                app.router.add_get("/query", self._engine_ids)
        return app

    def _tell(self, router: web.UrlDispatcher) -> None:
        """Add the endpoints for operators: those that report the engine's state, and the reset of the prefix cache."""
        router.add_get("/health", self._empty)
        router.add_get("/version", self._version)
        router.add_get("/load", self._server_load)
        router.add_get("/kv_event_sources", self._sources)
        router.add_post("/reset_prefix_cache", self._reset)

    @web.middleware
    async def _guard(self, request: web.Request, handler) -> web.StreamResponse:
        if self.authorization not in (None, request.headers.get("Authorization")) and request.path != "/health":
            return reply_json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except RequestError as error:
            return reply_json(error.body(), error.status)
        except web.HTTPException as error:
            refused = RequestError(error.reason, error.status, error.reason.replace(" ", ""))
            made = reply_json(refused.body(), error.status)
            made.headers.update({name: value for name, value in error.headers.items() if name == "Allow"})
            return made
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return reply_json(failed().body(), 500)

    # ---- generation

    async def _generate(self, ask: Callable, dialect: type, prefix: str, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        body, adapter, asked = await self._read(request, ask)
        passed_on = await self.transfers.read(request, body)
        failure = self._failure(asked)
        if failure is not None and not asked.stream:
            raise failure
        given = request.headers.get("x-request-id", "").encode(errors="surrogateescape").decode("latin-1")
        id = prefix + (given or uuid.uuid4().hex)
        generations = self._generations(id, asked, adapter, arrived) if failure is None else []
        if passed_on.get("do_remote_prefill"):
            await self._receive(passed_on, generations)
        answer = dialect(id, adapter or self.model, body, self.show_cached, asked.n)
        with self._under_way(generations):
            if asked.stream:
                return await self._stream(request, answer, generations, failure)
            kept = None
            if not passed_on.get("do_remote_decode"):
                await self._finish(generations)
            elif self.transfers.meets:
                await self.transfers.compute(passed_on["remote_request_id"], partial(self._computed, generations))
            else:
                await self._finish(generations)
                kept = self._keep(request, generations[0])
            said = answer.whole(generations)
            if self.transfers.wire and not self.transfers.meets:
                said["kv_transfer_params"] = kept
            return reply_json(said)

    @contextlib.contextmanager
    def _under_way(self, generations: list[Generation]) -> Iterator[None]:
        """Count a request as load (for GET /load) within a `with` block, and abort what has not ended at its end."""
        self._load += 1
        try:
            yield
        finally:
            self._load -= 1
            for generation in generations:
                self.runner.abort(generation)

    async def _computed(self, generations: list[Generation]) -> Prompts | None:
        """Compute prompts for another engine; return for each its tokens, and how many of them were found cached.

        Returns None if a generation ended before its token limit, as Mooncake's connector keeps no blocks then.
        """
        await self._finish(generations)
        kept = all(one.reason == "length" for one in generations)
        return [(len(one.prompt), one.cached) for one in generations] if kept else None

    async def _receive(self, parameters: dict, generations: list[Generation]) -> None:
        try:
            for generation, found in zip(generations, await self.transfers.fetch(parameters), strict=True):
                generation.received, generation.cached_there = found
        except (NotThere, ValueError):
            raise failed() from None

    def _keep(self, request: web.Request, generation: Generation) -> dict | None:
        if request.transport is None:
            return None
        tokens, address = len(generation.prompt), request.transport.get_extra_info("sockname")[:2]
        blocks = -(-tokens // self.runner.engine.profile.block_size)
        return self.transfers.keep(tokens, blocks, address, generation.cached)

    async def _hand_over(self, request: web.Request) -> web.Response:
        """Answer another engine that fetches the KV cache of a prompt.

        With Mooncake's connector, this waits until the prompt is computed.
        """
        try:
            return reply_json(await self.transfers.hand_over(request.match_info["name"], request.query.get("kind", "")))
        except NotThere:
            return reply_json({"error": "nothing is kept here for an engine of this kind"}, 404)

    async def _kept(self, request: web.Request) -> web.Response:
        return reply_json({"open": self.transfers.open})

    async def _engine_ids(self, request: web.Request) -> web.Response:
        port = request.transport.get_extra_info("sockname")[1] if request.transport is not None else 0
        return reply_json({"0": {"engine_id": engine_id(port), "worker_addr": {}}})

    def _fail_on_order(self, request: web.Request) -> None:
        if self.faults.happens("refuse"):
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError
        if self.faults.happens("error_503"):
            full = "The engine is currently busy and cannot accept new requests. Please try again later."
            raise RequestError(full, 503, "Service Unavailable")
        if self.faults.happens("error_500"):
            raise failed()

    def _failure(self, asked: Asked) -> RequestError | None:
        """Return the error that this request has to get, or None.

        The error is injected, or a token id of the prompt is not in the vocabulary. A stream gets it after its status
        200, as vLLM checks the ids only after it has sent the status.
        """
        if (asked.stream and self.faults.happens("error_stream")) or self.faults.strikes():
            return failed()
        if not asked.text and (worst := max(map(max, asked.prompts))) >= self.tokens.vocab_size:
            return RequestError(f"Token id {worst} is out of vocabulary")
        return None

    def _adapter(self, model) -> str | None:
        """Return an adapter's name, or None for the base model."""
        if model is None or model == self.model:
            return None
        if model in self.adapters:
            return model
        raise RequestError(f"The model `{model}` does not exist.", 404, "NotFoundError", "model")

    async def _read(self, request: web.Request, ask: Callable) -> tuple[dict, str | None, Asked]:
        """Return a request's body, the name of its adapter (None: the base model), and the parsed request.

        `ask`: parses a body of this endpoint's API.
        """
        raw = await request.read()
        self._fail_on_order(request)
        body = requests.parse(raw)
        return body, self._adapter(body.get("model")), await self._asked(ask, body, len(raw))

    async def _asked(self, ask: Callable, body: dict, size: int) -> Asked:
        try:
            if size <= INLINE_BYTES:
                return ask(body, self.tokens)
            return await asyncio.get_running_loop().run_in_executor(None, ask, body, self.tokens)
        except (AttributeError, KeyError, TypeError) as error:
            raise RequestError(f"the body has a field of a wrong type: {error}") from None

    def _generations(self, id: str, asked: Asked, adapter: str | None, arrived: float) -> list[Generation]:
        made, most, longest = [], asked.max_tokens, self.context_length
        weights = adapter and f"{adapter}\0{self.adapters.get(adapter)}"
        if most is not None and most > longest:
            why = f"{asked.limit}={most} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
            raise RequestError(why, param=asked.limit)
        for prompt in asked.prompts:
            room = longest - len(prompt)
            if room < 1 or (not asked.clip and most is not None and most > room):
                wanted = f" and asked for {most} tokens of output" if most is not None else ""
                why = (
                    f"This model's maximum context length is {longest} tokens. However, your request has {len(prompt)} "
                    f"input tokens{wanted}. Please reduce the length of the input messages."
                )
                raise RequestError(why, param="input_tokens")
            for _ in range(asked.n):
                name = f"{id}-{len(made)}-{uuid.uuid4().hex[:8]}"
                made.append(Generation(name, prompt, asked, arrived, adapter, weights))
                made[-1].plan(self.replies, self.tokens.eos_id, room)
        return made

    async def _finish(self, generations: list[Generation], report: Callable[..., bool] | None = None) -> None:
        """Run generations to their end, or until `report` returns True.

        `report(generation, start, ended)`: called when a step has computed tokens of a generation. `start`: the number
        of the first new token; `ended`: all generations have ended. It returns True if nothing more is wanted.
        """
        done, left = asyncio.get_running_loop().create_future(), len(generations)

        def tell(generation: Generation, output: Output) -> None:
            nonlocal left
            if done.done():  # it failed, and the rest is not aborted yet
                return
            start, generation.sent = generation.sent, generation.sent + output.tokens
            left -= output.finished is not None
            if (report is not None and report(generation, start, not left)) or not left:
                done.set_result(None)

        for generation in generations:
            generation.tell = tell
            self.runner.submit(generation)
        await done

    async def _stream(
        self, request: web.Request, answer, generations: list[Generation], failure: RequestError | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        if chunked := request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        await response.prepare(request)
        transport, breaks = request.transport, self.faults.happens("die_mid_stream")
        if transport is None:  # the client left while the head was sent
            return response
        fails = failure is None and self.faults.happens("error_mid_stream")
        if begun := answer.announce() + (answer.error(failure.body()) if failure is not None else b""):
            await response.write(begun)
        index_of = {id(generation): index for index, generation in enumerate(generations)}

        def report(generation: Generation, start: int, ended: bool) -> bool:
            index, end = index_of[id(generation)], generation.sent
            told = [answer.begin(generation, index)] if start == 0 else []
            told.append(answer.tokens(generation, index, start, end))
            if failing := fails and end > 1:
                told.append(answer.error(failed().body()))
            elif ended:
                told.append(answer.close(generations))
            if not transport.is_closing():  # one write per step: the system call is most of a token's cost
                told = [b"%x\r\n%b\r\n" % (len(data), data) for data in told if data] if chunked else told
                transport.write(b"".join(told))
            if breaks and end > 1:
                transport.abort()
            return failing

        if failure is None:
            await self._finish(generations, report)
        await response.write_eof()
        return response

    # ---- the rest

    async def _embeddings(self, request: web.Request) -> web.Response:
        arrived = time.monotonic()
        body, adapter, asked = await self._read(request, requests.embeddings)
        id = "embd-" + uuid.uuid4().hex
        generations = self._generations(id, asked, adapter, arrived)
        with self._under_way(generations):
            await self._finish(generations)
        encoding = body.get("encoding_format")
        return reply_json(dialects.embeddings(id, adapter or self.model, generations, EMBEDDING, encoding))

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
        return reply_json({"count": len(ids), "max_model_len": self.context_length, "tokens": ids, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = requests.parse(await request.read())
        self._adapter(body.get("model"))
        (ids,) = requests.texts([body.get("tokens")], self.tokens, False, "tokens")
        return reply_json({"prompt": self.tokens.decode(ids)})

    async def _models(self, request: web.Request) -> web.Response:
        same = {"object": "model", "created": self.runner.started, "owned_by": "hitherto", "permission": []}
        base = {"id": self.model, "root": self.root, "parent": None, "max_model_len": self.context_length}
        of_base = {"parent": self.model, "max_model_len": None}
        adapters = [{"id": name, "root": path} | of_base for name, path in self.adapters.items()]
        return reply_json({"object": "list", "data": [card | same for card in (base, *adapters)]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Load an adapter, as vLLM does with VLLM_ALLOW_RUNTIME_LORA_UPDATING; here any name and path are valid."""
        given = requests.checked(requests.Adapter, requests.parse(await request.read()))
        name = given.lora_name
        if name == self.model or (name in self.adapters and not given.load_inplace):
            raise RequestError(f"The lora adapter {name!r} has already been loaded.", 400, "InvalidUserInput")
        self.adapters[name] = given.lora_path or name
        return web.Response(text=f"Success: LoRA adapter {name!r} added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = requests.checked(requests.Adapter, requests.parse(await request.read())).lora_name
        if self.adapters.pop(name, None) is None:
            raise RequestError(f"The lora adapter {name!r} cannot be found.", 404, "NotFoundError")
        return web.Response(text=f"Success: LoRA adapter {name!r} removed successfully.")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.runner.metrics.text(), headers={"content-type": "text/plain; version=0.0.4"})

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
            raise RequestError("requests are running: the prefix cache is not reset", 409, "Conflict")
        return web.Response()

    async def _held(self, request: web.Request) -> web.Response:
        """Answer with the keys of all blocks in the GPU cache, so that tests can check a gateway's map of them.

        The keys are those that KV events have.
        """
        return reply_json({"keys": self.runner.engine.pool.keys})

    async def _faults(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            ordered = requests.checked(Faults, requests.parse(await request.read()))
            for name in ordered.model_fields_set:
                setattr(self.faults, name, getattr(ordered, name))
        batches = self.publisher.sequence if self.publisher else 0  # published so far, including those with a fault
        return reply_json({**self.faults.model_dump(), "event_batches": batches})
