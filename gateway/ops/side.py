"""The HTTP server of the admin API: its routes, the access check, and errors in OpenAI's format.

It listens on a port or on a unix socket.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import http, web

from gateway.errors import ApiError, error_object
from gateway.settings import ADMIN_SIDE, ConfigError
from replicas.ports import cannot_listen

from .guard import CHALLENGE, PASSED_ON, Guard, Refusal
from .page import PAGE, page_file
from .readiness import readiness

log = logging.getLogger("hitherto.admin")
SMALL_BYTES = 16 * 1024  # answers up to this size are gzipped on the event loop, larger ones in a thread
_server_log = logging.getLogger("hitherto.admin.http")  # aiohttp's own messages


def _of_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record is about an error of the gateway itself, not about a client's broken request.

    Broken requests are bytes that are no HTTP, as port scanners send them, and bodies with a wrong encoding. Their
    clients have got a 400 already, and they must not fill the log.
    """
    foreign = (http.HttpProcessingError, web.RequestPayloadError)
    return not (record.exc_info and isinstance(record.exc_info[1], foreign))


_server_log.addFilter(_of_ours)


def answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS) + b"\n", status=status, content_type="application/json"
    )


def error(status: int, message: str, code: str | None) -> web.Response:
    return answer(error_object("", status, message, code=code), status)


def metrics_page(request: web.Request, page: bytes, content_type: str) -> web.Response:
    """Return the answer to GET /metrics with the text `page`.

    It is gzipped, to a tenth of its size, if the client accepts that; a large page is compressed in a thread.
    """
    response = web.Response(body=page, headers={"Content-Type": content_type}, zlib_executor_size=SMALL_BYTES)
    response.headers["Vary"] = "Accept-Encoding"
    if re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", request.headers.get("Accept-Encoding", ""), re.I):
        response.enable_compression(web.ContentCoding.gzip)
    return response


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return the handler's response, or a JSON error for the exception that it raises."""
    try:
        return await handler(request)
    except Refusal as refusal:
        refused = error(refusal.status, str(refusal), refusal.code)
        if refusal.status == 401:
            refused.headers["WWW-Authenticate"] = CHALLENGE
        return refused
    except ConnectionResetError:  # within the request's body: no client is left to read this
        return error(400, "the request ended before its body did", "bad_request")
    except web.RequestPayloadError:
        what = "the request's body is not as its Content-Encoding or Transfer-Encoding says"
        return error(400, what, "bad_request")
    except ApiError as wrong:
        return answer(wrong.object(""), wrong.status)
    except web.HTTPMethodNotAllowed as refused:
        return error(405, f"{request.path} takes {', '.join(sorted(refused.allowed_methods))}", "method_not_allowed")
    except web.HTTPException as refused:
        what = (
            f"there is nothing at {request.path}; see / for what is here" if refused.status == 404 else refused.reason
        )
        return error(refused.status, what, None)
    except Exception:
        log.exception("the admin side failed on %s %s", request.method, request.path)
        return error(500, "the admin side failed on this request; the gateway's log says why", None)


class Side(ABC):
    """The base class of the admin API's server, for one gateway or for the supervisor of several workers.

    A subclass defines `_status` and a handler for each other route, such as `metrics` for /metrics. `start` (a port) or
    `start_at` (a unix socket) opens the server, `stop` closes it. `guard`: checks who may use it.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    @abstractmethod
    async def _status(self) -> dict[str, Any]:
        """Return the status of the gateway, or of all workers together, as JSON data."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.status_page),
            web.get("/livez", self.livez),
            web.get("/readyz", self.readyz),
            web.get("/metrics", self.metrics),
            web.get("/status", self.status),
            web.get("/recent", self.recent),
            web.get(f"/{PAGE}/{{name}}", self.page_file),
            web.get("/replicas", self.list),
            web.post("/replicas", self.add),
            web.post("/replicas/{id}/drain", self.drain),
            web.delete("/replicas/{id}", self.remove),
            web.route("*", "/replicas/{id}/engine/{path:.*}", self.ask_engine, name=PASSED_ON),
            web.post("/replicas/{id}/blocks", self.blocks),
            web.post("/explain", self.explain),
            web.post("/decide", self.decide),
            web.post("/decide/{id}/first_byte", self.first_byte),
            web.post("/decide/{id}/done", self.done),
        ]

    async def page_file(self, request: web.Request) -> web.Response:
        return page_file(request.match_info["name"])

    async def status_page(self, request: web.Request) -> web.Response:
        return page_file("index.html")

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guarded], client_max_size=64 * 2**20)
        app.add_routes(self.routes())
        return app

    async def livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        """Answer 200 if the gateway, or each model named by ?model=, is ready, else 503.

        The reason is shown only to requests with the admin token.
        """
        asked = request.query.getall("model", [])
        if "" in asked:
            raise ApiError(400, "model= names no model: /readyz?model=NAME, or /readyz for the gateway", param="model")
        found = readiness(await self._status(), asked)
        if not self.guard.knows_token(request):
            found = {"ready": found["ready"], "why_not": found["why_not"] and "ask with the admin token to be told"}
        return answer(found, 200 if found["ready"] else 503)

    async def status(self, request: web.Request) -> web.Response:
        return answer(await self._status())

    async def list(self, request: web.Request) -> web.Response:
        return answer({"replicas": (await self._status())["replicas"]})

    @web.middleware
    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request if the guard allows it, and add the headers that all answers have."""

        async def checked(request: web.Request) -> web.StreamResponse:
            self.guard.check(request)
            return await handler(request)

        response = await answered(request, checked)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers[ADMIN_SIDE] = "1"
        return response

    async def start(self, host: str, port: int) -> int:
        """Listen on this address and return the port. Raises ConfigError if the port is taken.

        `port`: 0 for any free port.
        """
        await self._set_up()
        try:
            await web.TCPSite(self.runner, host, port, reuse_address=True).start()
        except OSError as wrong:
            await self.runner.cleanup()
            why = cannot_listen(host, port, wrong, "--admin-port", "--admin-host")
            raise ConfigError(f"admin side: {why}") from None
        return self.runner.addresses[0][1]

    async def start_at(self, path: Path) -> None:
        """Listen on a unix socket at `path`. The permissions of its folder decide who may connect."""
        await self._set_up()
        await web.UnixSite(self.runner, path).start()

    async def _set_up(self) -> None:
        self.runner = web.AppRunner(self.app(), access_log=None, logger=_server_log, shutdown_timeout=1.0)
        await self.runner.setup()

    async def stop(self) -> None:
        await self.runner.cleanup()
