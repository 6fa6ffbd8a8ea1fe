"""The admin API: HTTP routes for operators, on a port of its own.

    GET  /livez                 200 as long as the process runs its event loop; depends on nothing else
    GET  /readyz                200 if a request for some model (with ?model=NAME: for this one) could be served now;
                                else 503 with the reason
    GET  /metrics               for Prometheus
    GET  /                      the live page; as JSON, GET /status the state, GET /recent the last 15 minutes
    GET  /replicas              lists the replicas
    POST /replicas              {"url": "http://HOST:PORT"} adds a replica (201), or takes a stopped one back (200);
                                waits for a drain or removal of it that is under way. 409 if it was added with another
                                #fragment. After a restart the gateway knows the replica only with --replica-file
    POST /replicas/ID/drain     sends the replica no new requests; those that it has are finished
    DELETE /replicas/ID         drains the replica and forgets it
                                (an engine with data-parallel ranks: HOST:PORT-dp0 is one rank, HOST:PORT all)
    ANY  /replicas/ID/engine/PATH  passed on to that engine: /sleep, /reset_prefix_cache, /v1/load_lora_adapter ...
    POST /replicas/ID/blocks    {"keys": [...]}, the keys of all blocks that the engine has: where the cache map differs
    POST /explain?path=/v1/...  what would happen to this request; nothing is sent
    POST /decide?path=/v1/...   chooses the replica for another proxy's request, and counts the request as load there
                                until the caller reports its end:
    POST /decide/ID/first_byte  its answer has begun
    POST /decide/ID/done        its answer has ended; if its last bytes are posted, the usage in them is learned from

Requests that change something are sent as application/json. `guard` decides who may use the admin API. Errors have the
format of OpenAI's.
"""

from __future__ import annotations

import asyncio
import logging
from time import time
from typing import Any

import orjson
from aiohttp import ClientError, web

from gateway.proxy.placement.decisions import LEASE, LEASES
from replicas.kept import KeptReplicas
from replicas.lifecycle import TAKES_TRAFFIC
from replicas.replica import KEYS, Address, parse_url
from replicas.roles import BOTH

from .guard import Guard, Refusal
from .recent.recent import told
from .side import Side, answer, metrics_page

log = logging.getLogger("hitherto.admin")

MOST_LEFT = 100  # running requests that the answer to a removal names


def headers_of(request: web.Request) -> dict[str, str]:
    """Return the request's headers by lower-case names, as the prompt pipeline expects them."""
    return {name.lower(): value for name, value in request.headers.items()}


async def keep(kept: KeptReplicas | None, change: str, what: str) -> str | None:
    """Add a replica to the file of replicas or remove it there; return the URL that the file had for it, or None.

    `kept`: the file, or None without --replica-file: then nothing is done. `change`: "add" or "remove". `what`: the URL
    to add, or the id to remove. Raises Refusal if the file cannot be written.

    Call this before the change itself is made, since a change that was reported to the operator must survive a restart.
    """
    if kept is None:
        return None
    try:
        return await asyncio.to_thread(getattr(kept, change), what)
    except OSError as wrong:
        message = f"nothing was changed: {kept.path} cannot be written: {wrong.strerror or wrong}. Mend that, or leave --replica-file out"
        raise Refusal(500, message, "replica_file") from None


def _refuse_another(engine: Any, address: Address) -> None:
    """Raise Refusal if the URL's #fragment contradicts the fragment with which the engine was added.

    `engine`: the engine as it was added. `address`: the URL of the new request, parsed.
    """
    lead = engine.lead
    kept = (engine.given, lead.required_model, lead.role, lead.spill, lead.moves_by, lead.bootstrap, lead.peer)
    given = (address.source, address.model, address.role, address.spill, address.transfer)
    given += (address.bootstrap, address.peer)
    unsaid = (None, None, BOTH, False, "", 0, "")
    if any(one not in (nothing, known) for one, nothing, known in zip(given, unsaid, kept, strict=True)):
        message = f"replica {address.id} was added with another #fragment, which it keeps: DELETE /replicas/{address.id} first, then post this again"
        raise Refusal(409, message, "replica_exists")


def with_members(body: Any) -> str:
    """Return the URL in the JSON body of POST /replicas, with the body's other members in the URL's #fragment.

    Raises ValueError for a body without a URL, and for an unknown member or value.
    """
    url = body.get("url") if isinstance(body, dict) else None
    if not isinstance(url, str):
        raise ValueError
    said = []
    for name, value in body.items():
        if name == "url" or (name in KEYS and value is False):
            continue
        if name not in KEYS:
            raise ValueError(f"{name[:100]!r} is unknown; besides url it may have {', '.join(KEYS)}")
        text = "yes" if value is True else str(value)
        if not isinstance(value, str | int) or {*",#"} & {*text} or (name == "model" and not isinstance(value, str)):
            raise ValueError(f"{name} is {text[:100]!r}, which is no word or number; put a name in quotes")
        said.append(f"{name}={text}")
    return f"{url}{',' if '#' in url else '#'}{','.join(said)}" if said else url


def replica_of(body: bytes) -> tuple[str, Address]:
    """Return the URL in the body of POST /replicas, as text and parsed. Raises Refusal if it cannot be used."""
    try:
        url = with_members(orjson.loads(body))
    except ValueError as wrong:
        what = f": {wrong}" if str(wrong) and not isinstance(wrong, orjson.JSONDecodeError) else ""
        raise Refusal(400, f'the body must be {{"url": "http://HOST:PORT"}}{what}', "invalid_body") from None
    try:
        return url, parse_url(url)
    except ValueError as wrong:
        raise Refusal(400, str(wrong), "invalid_url") from None


class Admin(Side):
    """The admin API of one gateway, an `app.Gateway`. Handlers raise Refusal or ApiError."""

    def __init__(self, gateway: Any, guard: Guard) -> None:
        super().__init__(guard)
        self.gateway = gateway
        self._keeping = asyncio.Lock()  # one change of the file of replicas at a time

    async def metrics(self, request: web.Request) -> web.Response:
        page, content_type = await self.gateway.metrics.exposition()
        return metrics_page(request, page, content_type)

    async def _status(self) -> dict[str, Any]:
        return self.gateway.status()

    async def recent(self, request: web.Request) -> web.Response:
        return answer(await asyncio.to_thread(told, self.gateway.recent.kept(), time()))

    async def add(self, request: web.Request) -> web.Response:
        """Add the replica that the body names (201), or take a stopped one back into use (200). Raises Refusal."""
        url, address = replica_of(await request.read())
        fleet, id = self.gateway.fleet, address.id
        try:
            await fleet.quiet(id)
            if id not in fleet.engines:
                await self._keep("add", url)
                await fleet.quiet(id)  # another request may have added and removed it meanwhile
            if id in fleet.engines:
                _refuse_another(fleet.engines[id], address)
            known = set(fleet.replicas)
            replica = fleet.add(url)
        except ValueError as wrong:
            raise Refusal(400, str(wrong), "invalid_url") from None
        log.info("replica %s added by an operator", replica.id)
        return answer(self._shown(replica.id), 200 if replica.id in known else 201)

    async def _keep(self, change: str, what: str) -> None:
        async with self._keeping:
            await keep(self.gateway.kept, change, what)

    async def drain(self, request: web.Request) -> web.Response:
        """Begin to drain a replica and answer at once; the replica's state shows when the drain is done.

        `last_ready_of` in the answer lists the models that no replica serves any more because of the drain.
        """
        id = self._known(request)
        served = self._served_models()
        self.gateway.fleet.drain(id)
        told = self._shown(id)
        left = self._served_models()
        if "any model" not in left and (last := sorted(served - left)):
            log.warning("replica %s drained by an operator: this was the last ready replica of %s", id, ", ".join(last))
            told = {**told, "last_ready_of": last}
        return answer(told, 202)

    def _served_models(self) -> set[str]:
        """Return the models of the replicas that take traffic; "any model" stands for a replica that reports none."""
        ready = [one for one in self.gateway.fleet.replicas.values() if one.state in TAKES_TRAFFIC]
        return {name for one in ready for name in one.models or ("any model",)}

    async def remove(self, request: web.Request) -> web.Response:
        """Drain and remove a replica, and answer when that is done.

        If the client disconnects before that, the removal goes on. `left` and `requests` in the answer are the number
        and the ids of requests that still run on the removed replica.
        """
        id = self._known(request)
        replicas = {id}
        if id in self.gateway.fleet.engines:
            replicas |= {one.id for one in self.gateway.fleet.engines[id].replicas}
            await self._keep("remove", id)
        try:
            removed = self.gateway.fleet.remove(id)
        except ValueError as wrong:
            raise Refusal(409, str(wrong), "one_of_several") from None
        await asyncio.shield(removed)
        log.info("replica %s removed by an operator", id)
        told: dict[str, Any] = {"id": id, "removed": True}
        if left := self.gateway.requests_at(replicas):
            log.warning("%d requests go on at %s, which was removed: %s", len(left), id, ", ".join(left[:MOST_LEFT]))
            told |= {"left": len(left), "requests": left[:MOST_LEFT]}
        return answer(told)

    async def ask_engine(self, request: web.Request) -> web.Response:
        """Forward a request to an engine's own API, which clients do not reach, and return the engine's answer."""
        id, url = self._known(request), request.rel_url
        target = "/" + url.raw_path.split("/", 4)[4] + (f"?{url.raw_query_string}" if url.raw_query_string else "")
        log.info("an operator asks the engine of %s: %s %s", id, request.method, url.raw_path)
        try:
            body = await request.read()
            status, kind, body = await self.gateway.fleet.ask_engine(
                id, request.method, target, body, request.content_type
            )
        except (ClientError, OSError) as wrong:
            message = f"the engine of {id} did not answer: {str(wrong) or type(wrong).__name__}"
            raise Refusal(502, message, "engine_unreachable") from None
        return web.Response(body=body, status=status, headers={"Content-Type": kind})

    async def blocks(self, request: web.Request) -> web.Response:
        """Compare an engine's own list of its KV cache blocks with the cache map.

        This is for tests, and to check predictions. In the answer, `missing` are the keys that the map does not know,
        and `besides` the hashes of the blocks that only the map has.
        """
        id, wrong = self._known(request), Refusal(400, 'the body must be {"keys": [64-bit integers]}', "invalid_body")
        try:
            body = orjson.loads(await request.read())
        except ValueError:
            raise wrong from None
        keys = body.get("keys") if isinstance(body, dict) else None
        if not isinstance(keys, list) or not all(type(key) is int for key in keys):
            raise wrong
        try:
            differs = self.gateway.differs(id)
        except KeyError:
            raise Refusal(404, f"nothing is known of the blocks of {id!r}", "unknown_replica") from None

        missing, besides = await asyncio.to_thread(differs, keys)
        return answer({"missing": [keys[at] for at in missing], "besides": [f"{one:016x}" for one in besides]})

    async def explain(self, request: web.Request) -> web.Response:
        path = request.query.get("path", "/v1/chat/completions")
        return answer(await self.gateway.explain(path, await request.read(), headers_of(request)))

    async def decide(self, request: web.Request) -> web.Response:
        """Choose a replica for another proxy's request, and count the request as load there.

        It counts until the proxy reports its end, but for no longer than the lease (`lease_s` in the answer, in
        seconds).
        """
        query = request.query
        try:
            lease = float(query.get("lease_s", LEASE))
        except ValueError:
            lease = 0.0
        if not LEASES[0] <= lease <= LEASES[1]:
            raise Refusal(
                400, f"lease_s={query['lease_s']}: give seconds from {LEASES[0]:g} to {LEASES[1]:g}", "invalid_lease"
            )
        path = query.get("path", "/v1/chat/completions")
        body, exclude = await request.read(), query.getall("exclude", [])
        return answer(await self.gateway.decisions.decide(path, body, headers_of(request), exclude, lease))

    async def first_byte(self, request: web.Request) -> web.Response:
        return answer(await self.gateway.decisions.first_byte(request.match_info["id"]))

    async def done(self, request: web.Request) -> web.Response:
        return answer(await self.gateway.decisions.done(request.match_info["id"], await request.read()))

    def _known(self, request: web.Request) -> str:
        id = request.match_info["id"]
        if id not in self.gateway.fleet.replicas and id not in self.gateway.fleet.engines:
            # No guess at which was meant: the next command may remove it.
            known = ", ".join(self.gateway.fleet.replicas) or "none"
            raise Refusal(404, f"there is no replica {id!r}; there are: {known}", "unknown_replica")
        return id

    def _shown(self, id: str) -> dict[str, Any]:
        return next((shown for shown in self.gateway.status()["replicas"] if shown["id"] == id), {"id": id})
