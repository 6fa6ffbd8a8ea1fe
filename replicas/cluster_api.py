"""The pods of a Kubernetes cluster, read from its API.

Two calls are used: the list of pods that match a selector, in pages, and the stream of changes since that list.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from replicas import tls
from replicas.answer import MOST_VALUES, count_values
from replicas.ask import PLAIN, Connector, body_of
from replicas.pods import Discover, Place, Pod

ENDED = ("Succeeded", "Failed")  # phases of pods that never serve again
WATCH_SECONDS = 60  # the API ends a stream of changes after this time ...
SILENT_SECONDS = 90.0  # ... and a stream that is silent for this long is dead
PAUSE_SECONDS = 0.5  # between two such streams
TELL_SECONDS = 0.25  # between two reports of all pods: handling 1,024 of them takes 20 ms
LONGEST_LINE = 2**20  # bytes of one change; up to twice that is accepted
PAGE = 100  # pods per request
MOST_PAGE, PAGE_VALUES = 2**24, 2**19  # bytes and JSON values of a page: a pod has about 10 kB and 1,000 values
MOST_KNOWN = 2**14  # pods that a selector may find
LONGEST_NAME, LONGEST_TOKEN = 253, 4096  # characters of a name, an address or a label, and of the next page's token
FORGOTTEN = 410  # the HTTP status for a resource version that the API no longer knows


class PodsError(Exception):
    """An error: the Kubernetes API did not answer as expected; the text says why and what would help."""


class Pods:
    """The pods that the operator's label selector finds; `changed` is called with all of them after each change."""

    def __init__(self, discover: Discover, where: Place, changed: Callable[[list[Pod]], None]):
        self._path = f"{where.api}/api/v1/namespaces/{where.namespace}/pods"
        self._selector, self._where, self._changed = discover.selector, where, changed
        self._labels = frozenset(discover.labels.values())  # the labels to keep of each pod
        self._known: dict[str, Pod] = {}  # by uid
        self._due: asyncio.TimerHandle | None = None  # when `changed` is called next
        self._told_at = float("-inf")

    async def list(self) -> list[Pod]:
        """Return the pods that the selector finds now. Raises PodsError."""
        async with self._session() as session:
            await self._list(session)
        return [*self._known.values()]

    async def follow(self) -> None:
        """Call `changed` with all pods now, and soon after each change.

        Returns when the API no longer has the changes since the last known state of the list; then call this again.
        Raises PodsError if the API fails; the pods reported last stay valid until it answers again.
        """
        try:
            async with self._session() as session:
                version = await self._list(session)
                self._tell()
                while version:
                    version = await self._watch(session, version)
                    await asyncio.sleep(PAUSE_SECONDS)
        except PodsError:
            if self._due is not None:
                self._tell()
            raise
        except asyncio.CancelledError:
            if self._due is not None:
                self._due.cancel()
            raise

    def _tell(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._changed([*self._known.values()])
        self._told_at = asyncio.get_running_loop().time()

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENT_SECONDS)
        limits: dict[str, Any] = {"timeout": timeout, "read_bufsize": LONGEST_LINE}
        trusted = Connector(ssl=tls.context(self._where.authorities))
        return aiohttp.ClientSession(connector=trusted, auto_decompress=False, **limits)

    async def _list(self, session: aiohttp.ClientSession) -> str:
        known: dict[str, Pod] = {}
        options = {"limit": str(PAGE)}
        for _ in range(-(-MOST_KNOWN // PAGE)):
            async with self._ask(session, options) as answer:
                body = await body_of(answer, MOST_PAGE)
                version, more = await asyncio.to_thread(self._read_page, body, known)
                if not more:
                    seen = [uid for uid in self._known if uid in known]  # known pods keep their order
                    self._known = {uid: known[uid] for uid in [*seen, *known]}
                    return version
                options["continue"] = more
        raise PodsError(self._too_many())

    def _read_page(self, body: bytes, known: dict[str, Pod]) -> tuple[str, str]:
        """Add the pods of one page to `known`; return the list's version and the token of the next page, "" if none."""
        told = _read(body, PAGE_VALUES)
        for one in told.get("items") or ():
            self._take(known, "ADDED", one)
        return _version(told), _text(told["metadata"].get("continue") or "", LONGEST_TOKEN)

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """Apply the changes after resource version `version` until the API ends the stream of changes.

        Returns the resource version at the end of the stream, or "" if all pods must be listed again.
        """
        asked = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        asked["timeoutSeconds"] = str(WATCH_SECONDS)
        async with self._ask(session, asked) as answer:
            if answer.status == FORGOTTEN:
                return ""
            async for line in answer.content:
                await asyncio.sleep(0)  # lines that arrived together would be read without a pause
                change = _read(line, MOST_VALUES)
                kind, what = change["type"], change["object"]
                if kind == "ERROR":
                    return ""
                version = _version(what)
                if kind != "BOOKMARK" and self._take(self._known, kind, what) and self._due is None:
                    # one report for all changes that arrive close together
                    self._due = asyncio.get_running_loop().call_at(self._told_at + TELL_SECONDS, self._tell)
        return version

    def _take(self, known: dict[str, Pod], kind: str, told: dict[str, Any]) -> bool:
        """Apply one change from the API to `known` (pods by uid); return whether `known` differs now.

        `kind`: ADDED, MODIFIED or DELETED; `told`: the pod's description. A pod that is being deleted counts as gone,
        though it may still finish the requests that it computes.
        """
        metadata, status = told["metadata"], told.get("status") or {}
        uid = _text(metadata["uid"])
        before, now = known.get(uid), None  # a pod that changes keeps its place in the order
        ended = kind == "DELETED" or metadata.get("deletionTimestamp") or status.get("phase") in ENDED
        if not ended and status.get("podIP"):
            if before is None and len(known) >= MOST_KNOWN:
                raise PodsError(self._too_many())
            labels = metadata.get("labels") or {}
            if not isinstance(labels, dict):
                raise TypeError(f"the labels {labels!r} are of no pod"[:300])
            used = {label: _text(labels[label]) for label in self._labels if label in labels}
            now = known[uid] = Pod(_text(metadata["name"]), _text(status["podIP"]), used, uid)
        elif before is not None:
            del known[uid]
        return now != before

    def _too_many(self) -> str:
        return f"{self._path} tells of more than {MOST_KNOWN:,} pods; see discover.selector"

    @asynccontextmanager
    async def _ask(
        self, session: aiohttp.ClientSession, options: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            query, headers = {"labelSelector": self._selector, **options}, {**PLAIN, **self._where.headers}
            async with session.get(self._path, params=query, headers=headers, allow_redirects=False) as answer:
                if answer.status not in (200, FORGOTTEN):
                    raise PodsError(self._refusal(answer.status, await body_of(answer)))
                yield answer
        except (aiohttp.ClientError, OSError) as error:
            raise PodsError(f"{self._path} does not answer: {str(error) or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, HttpProcessingError) as error:
            # raised for a line that is too long as well
            why = f"the answer is not a Kubernetes API's ({repr(error)[:300]}); check discover.api"
            raise PodsError(f"{self._path}: {why}") from None

    def _refusal(self, status: int, body: bytes) -> str:
        try:
            said = str(orjson.loads(body)["message"])[:300]
        except (ValueError, KeyError, TypeError):
            said = body[:200].decode(errors="replace")
        remedy = "see discover.selector and discover.namespace"
        if status in (401, 403):
            remedy = "let the gateway's ServiceAccount get, list and watch pods in that namespace"
        return f"{self._path} answers {status}: {said}; {remedy}"


def _version(told: dict[str, Any]) -> str:
    return _text(told["metadata"]["resourceVersion"])


def _text(found: Any, most: int = LONGEST_NAME) -> str:
    """Return `found`; raise TypeError if it is not a text of at most `most` characters."""
    if not isinstance(found, str) or len(found) > most:
        raise TypeError(repr(found)[:100] + f" is no text of at most {most} characters")
    return found


def _read(text: bytes, most_values: int) -> dict[str, Any]:
    if count_values(text) > most_values:
        raise ValueError(f"it has more than {most_values:,} values")
    found = orjson.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text[:100]!r} is no object")
    return found
