"""One HTTP GET to an engine, with a deadline. Errors are described in the returned `Answer` and not raised."""

import asyncio
import errno
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler

from replicas.answer import MOST_VALUES, Answer
from replicas.deadline import within

T = TypeVar("T")

# Limit of an answer's bytes: a /metrics page of 64 ranks has 2 MB, and so do 10,000 names in /v1/models.
MOST_BYTES = 1 << 23
BIG = 1 << 16  # a /metrics page larger than this is parsed in a thread
MODELS_VALUES = 1 << 18  # limit for /v1/models: 10,000 names have 220,000 values in vLLM's answer
# An answer's headers and chunk framing may have MOST_FRAMING bytes and a quarter of its body's length. aiohttp does not
# limit them, and parsing 256 KiB of interim responses (1xx) or of one-byte chunks takes 0.3 s. So an answer is checked
# after every LOOK_BYTES.
MOST_FRAMING, LOOK_BYTES = 1 << 14, 1 << 12
PLAIN = {"accept-encoding": "identity"}  # 9 MB of gzip were seen to unpack to 4 GB
GATEWAY = "x-hitherto-gateway"  # a header of /health that gateways send and engines do not
# These errors are the gateway's own and say nothing about the engine.
OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)


async def get(session: aiohttp.ClientSession, url: str, deadline: float) -> Answer:
    """GET a URL. Never raises, except when cancelled.

    `deadline`: seconds for connecting, headers and body together, counting only time in which the event loop ran.
    """
    where = urlsplit(url)
    try:
        return await within(deadline, _get(session, url))
    except TimeoutError:
        return Answer(0, fault="timeout", error=f"{where.path} did not answer within {deadline:g} s")
    except aiohttp.ClientConnectorDNSError:
        return Answer(0, fault="connect", error=unresolved(where.hostname or ""))
    except aiohttp.ClientConnectorCertificateError as error:
        what = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        return Answer(0, fault="connect", error=f"the certificate of {where.netloc} is not believed: {what}; "
                      "name the file of the authority that signed it with --replica-ca, or correct the host in the URL")  # fmt: skip
    except aiohttp.ClientSSLError as error:
        return Answer(0, fault="connect", error=f"no TLS with {where.netloc} ({error.os_error.strerror or error.os_error}): "
                      "if it speaks plain HTTP, write http:// in its URL")  # fmt: skip
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno in OWN_FAULTS:
            what = f"the gateway itself cannot open connections: {error.os_error.strerror}"
            return Answer(0, fault="own", error=f"{what}; raise its limits (`ulimit -n`)")
        refused = isinstance(error.os_error, ConnectionRefusedError)
        what = "nothing listens there" if refused else (error.os_error.strerror or str(error.os_error))
        return Answer(0, fault="connect", error=f"cannot connect to {where.netloc}: {what}", turns_away=refused)
    except aiohttp.ClientResponseError:
        return Answer(0, fault="refused", error=f"{where.path}: what answers at {where.netloc} does not speak HTTP as it should; "
                      "correct the port in the URL, or write https:// if it speaks TLS there")  # fmt: skip
    except TooLong as error:
        return Answer(0, fault="closed", error=f"{where.path}: its answer cannot be one: {error}", large=True)
    except aiohttp.ClientPayloadError:
        return Answer(0, fault="closed", error=f"{where.path}: the answer broke off, or cannot be decoded")
    except (aiohttp.ClientError, OSError) as error:
        what = getattr(error, "strerror", None) or "it was closed before the answer"
        return Answer(0, fault="closed", error=f"{where.path}: the connection broke: {what}")


async def _get(session: aiohttp.ClientSession, url: str) -> Answer:
    async with session.get(url, timeout=aiohttp.ClientTimeout(), allow_redirects=False) as response:
        over = getattr(response, "over", None)
        gateway = GATEWAY in response.headers
        body = await body_of(response)
        values = MODELS_VALUES if url.endswith("/v1/models") else MOST_VALUES
        answer = Answer(response.status, body, over=over, closes=_closes(response), gateway=gateway)
        answer.most_values, answer.large = values, len(body) > BIG
        if body[:1] in (b"{", b"["):
            answer.json()
        if answer.unreadable and answer.status == 200:
            raise TooLong(f"its JSON cannot be read: {answer.unreadable}")
        return answer


async def read(body: bytes, reader: Callable[..., T], *arguments: Any) -> T:
    """Return `reader(*arguments)`, where `reader` parses an answer's `body`; a big body is parsed in a thread.

    The event loop runs meanwhile only if `reader` is written in Python: parsers written in C hold the interpreter lock.
    """
    return await asyncio.to_thread(reader, *arguments) if len(body) > BIG else reader(*arguments)


class TooLong(aiohttp.ClientPayloadError):
    """An error: an answer is too large, or encoded in a way that was not requested."""


async def body_of(response: aiohttp.ClientResponse, most: int = MOST_BYTES) -> bytes:
    """Return the body of an answer to a request with the headers `PLAIN`.

    Raises TooLong if the body has more than `most` bytes or is compressed.
    """
    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise TooLong("it is compressed, though it was asked for as it is")
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise TooLong(f"it has more than {most >> 20} MiB")
    return b"".join(pieces)


class Bounded(ResponseHandler):
    """A connection that closes itself if an answer's headers and framing are too large relative to its body."""

    _came = 0  # bytes since the request was sent

    def set_response_params(self, **options: Any) -> None:
        self._came = 0
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data) or 1, LOOK_BYTES):
            super().data_received(piece := data[at : at + LOOK_BYTES])
            self._came += len(piece)
            if not self.is_connected():
                return
            body = self._payload.total_bytes if self._payload is not None else 0
            # while reading is paused, the parser buffers bytes that may belong to the body
            if not self._reading_paused and self._came > MOST_FRAMING + body + body // 4:
                error = TooLong("it is hardly more than heads and the frames of chunks")
                if self._payload is not None:
                    self._payload.set_exception(error)
                self.set_exception(error)
                if self.transport is not None:
                    self.transport.close()
                return


class Connector(aiohttp.TCPConnector):
    """An aiohttp connector whose connections (`Bounded`) limit the headers and framing of answers."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._factory = partial(Bounded, loop=self._loop)  # type: ignore[assignment]


class Response(aiohttp.ClientResponse):
    """A response that keeps a reference to its connection (in `over`), even after the connection was released."""

    over: asyncio.BaseTransport | None = None

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        self.over = connection.transport
        return await super().start(connection)


def _closes(response: aiohttp.ClientResponse) -> bool:
    """Return whether the server closes the connection after this answer, by the rules of HTTP/1.1 and HTTP/1.0."""
    options = {one.strip().lower() for line in response.headers.getall("Connection", []) for one in line.split(",")}
    return "close" in options or (response.version == aiohttp.HttpVersion10 and "keep-alive" not in options)


def unresolved(host: str) -> str:
    return f"host name {host!r} does not resolve; check the replica's URL and DNS"
