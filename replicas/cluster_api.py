"""What a Kubernetes API tells of its pods.

Two of its calls are used: the list of pods that a selector finds, and the stream of changes since that list.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from replicas import tls
from replicas.ask import PLAIN, Connector, body_of
from replicas.pods import Discover, Place, Pod

ENDED = ("Succeeded", "Failed")  # phases of pods that never serve again
WATCH_SECONDS = 60  # the API ends a stream of changes after these ...
SILENT_SECONDS = 90.0  # ... and one that is silent for so long is dead
PAUSE_SECONDS = 0.5  # between two such streams
LONGEST_LINE = 2**20  # bytes of one change, twice that at most
MOST_LIST = 2**26  # bytes of all pods that a selector finds, each of which may have 100 kB
FORGOTTEN = 410  # the status for a version that the API no longer knows


class PodsError(Exception):
    """The API did not tell of its pods. The text says why, and what would help."""


class Pods:
    """The pods that can be replicas, as the API tells of them: `changed` hears of all of them after each change."""

    def __init__(self, discover: Discover, where: Place, changed: Callable[[list[Pod]], None]):
        self._path = f"{where.api}/api/v1/namespaces/{where.namespace}/pods"
        self._selector, self._where, self._changed = discover.selector, where, changed
        self._known: dict[str, Pod] = {}  # by uid

    async def list(self) -> list[Pod]:
        """Those that there are now. Raises PodsError."""
        async with self._session() as session:
            await self._list(session)
        return [*self._known.values()]

    async def follow(self) -> None:
        """Tell of all pods now, and after each change. Returns when the API has forgotten what was told: ask it all
        over again. Raises PodsError; what was told then stays true until it is asked again."""
        async with self._session() as session:
            version = await self._list(session)
            self._changed([*self._known.values()])
            while version:
                version = await self._watch(session, version)
                await asyncio.sleep(PAUSE_SECONDS)

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENT_SECONDS)
        connector = Connector(ssl=tls.context(self._where.authorities))
        return aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=LONGEST_LINE, auto_decompress=False
        )

    async def _list(self, session: aiohttp.ClientSession) -> str:
        async with self._ask(session, {}) as answer:
            told = await asyncio.to_thread(_read, await body_of(answer, MOST_LIST))
            self._known = {}
            for one in told.get("items") or ():
                self._take("ADDED", one)
            return _version(told)

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """Take changes since `version`, until the API ends the stream; the version then, "" for none to go on from."""
        asked = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "resourceVersion": version,
        }
        async with self._ask(session, asked) as answer:
            if answer.status == FORGOTTEN:
                return ""
            async for line in answer.content:
                change = _read(line)
                kind, what = change["type"], change["object"]
                if kind == "ERROR":
                    return ""
                version = _version(what)
                if kind != "BOOKMARK" and self._take(kind, what):
                    self._changed([*self._known.values()])
        return version

    def _take(self, kind: str, told: dict[str, Any]) -> bool:
        """Whether one pod is another than before. A pod that is to end is gone: what it computes it may finish."""
        metadata, status = told["metadata"], told.get("status") or {}
        before, now = self._known.get(metadata["uid"]), None  # one that changes keeps its place before those behind it
        ended = kind == "DELETED" or metadata.get("deletionTimestamp") or status.get("phase") in ENDED
        if not ended and status.get("podIP"):
            now = self._known[metadata["uid"]] = _pod(metadata["name"], status["podIP"], metadata.get("labels") or {})
        elif before is not None:
            del self._known[metadata["uid"]]
        return now != before

    @asynccontextmanager
    async def _ask(
        self, session: aiohttp.ClientSession, options: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            query = {"labelSelector": self._selector, **options}
            async with session.get(
                self._path, params=query, headers={**PLAIN, **self._where.headers}, allow_redirects=False
            ) as answer:
                if answer.status not in (200, FORGOTTEN):
                    raise PodsError(self._refusal(answer.status, await body_of(answer)))
                yield answer
        except (aiohttp.ClientError, OSError) as error:
            raise PodsError(f"{self._path} does not answer: {str(error) or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, HttpProcessingError) as error:
            # also of a line that is too long
            raise PodsError(
                f"{self._path} tells what no Kubernetes API tells ({repr(error)[:300]}); see discover.api"
            ) from None

    def _refusal(self, status: int, body: bytes) -> str:
        try:
            said = str(orjson.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            said = body[:200].decode(errors="replace")
        rights = "let the gateway's ServiceAccount get, list and watch pods in that namespace"
        remedy = rights if status in (401, 403) else "see discover.selector and discover.namespace"
        return f"{self._path} answers {status}: {said[:300]}; {remedy}"


def _version(told: dict[str, Any]) -> str:
    found = told["metadata"]["resourceVersion"]
    if not isinstance(found, str):
        raise TypeError(f"the version {found!r} is no text")
    return found


def _pod(name: Any, ip: Any, labels: Any) -> Pod:
    """Raises TypeError for what no pod is told with."""
    if not (isinstance(name, str) and isinstance(ip, str) and isinstance(labels, dict)):
        raise TypeError(f"a pod's name {name!r}, address {ip!r} or labels {labels!r} are of no pod"[:300])
    if odd := [value for value in labels.values() if not isinstance(value, str)]:
        raise TypeError(f"the label {odd[0]!r} of pod {name} is no text"[:300])
    return Pod(name, ip, labels)


def _read(text: bytes) -> dict[str, Any]:
    found = orjson.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text[:100]!r} is no object")
    return found
