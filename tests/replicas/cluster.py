"""A server that speaks Kubernetes' API as far as it is about pods: lists, and streams of changes since a version."""

import asyncio
import json
import ssl
from itertools import count

from aiohttp import web


class Cluster:
    """`create`, `change` and `delete` pods, as `kubectl` would. `token`: what it asks for, if anything."""

    def __init__(self, token: str | None = None, refuses: int = 0):
        self.token, self.refuses = token, refuses
        self.pods: dict[str, dict] = {}  # by name
        self.told: bytes | None = None  # in place of any list
        self.changes: bytes | None = None  # in place of any stream
        self.watchers = 0
        self.watched = asyncio.Event()
        self.asked: list[dict[str, str]] = []
        self._versions, self._uids = count(1), count(1)
        self._changes: list[tuple[int, str, dict]] = []
        self._version, self._forgotten = 0, 0
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> str:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]
        return f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def create(self, name: str, ip: str | None, labels: dict[str, str], phase: str = "Running") -> None:
        metadata = {"name": name, "uid": f"uid-{next(self._uids)}", "labels": labels}
        await self._tell("ADDED", name, {"metadata": metadata, "status": {"phase": phase, "podIP": ip}})

    async def change(self, name: str, labels: dict[str, str] | None = None, **told: object) -> None:
        """`told`: of the metadata."""
        pod = json.loads(json.dumps(self.pods[name]))
        pod["metadata"] |= {**told, **({"labels": labels} if labels is not None else {})}
        await self._tell("MODIFIED", name, pod)

    async def delete(self, name: str) -> None:
        await self._tell("DELETED", name, self.pods[name])

    async def forget(self) -> None:
        """Past versions, as after a compaction: streams end, and none can go on from there."""
        async with self._changed:
            self._forgotten = self._version = next(self._versions)
            self._changed.notify_all()

    async def _tell(self, kind: str, name: str, pod: dict) -> None:
        async with self._changed:
            self._version = next(self._versions)
            pod["metadata"]["resourceVersion"] = str(self._version)
            self.pods.pop(name, None)
            if kind != "DELETED":
                self.pods[name] = pod
            self._changes.append((self._version, kind, pod))
            self._changed.notify_all()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({**request.query, "namespace": request.match_info["namespace"]})
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if self.refuses:
            return web.json_response({"kind": "Status", "message": "pods is forbidden"}, status=self.refuses)
        selector = dict(one.split("=") for one in request.query["labelSelector"].split(","))
        instead = self.changes if "watch" in request.query else self.told
        if instead is not None:
            return web.Response(body=instead)
        if "watch" in request.query:
            return await self._watch(request, selector, int(request.query["resourceVersion"]))
        found = [pod for _, pod in sorted(self.pods.items()) if selects(selector, pod)]
        begin, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        metadata = {"resourceVersion": str(self._version)}
        if begin + limit < len(found):
            metadata["continue"] = str(begin + limit)
        return web.json_response({"metadata": metadata, "items": found[begin : begin + limit]})

    async def _watch(self, request: web.Request, selector: dict[str, str], since: int) -> web.StreamResponse:
        if since < self._forgotten:
            return web.json_response({"kind": "Status", "message": "too old resource version"}, status=410)
        answer = web.StreamResponse()
        await answer.prepare(request)
        self.watchers += 1
        self.watched.set()
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._version > since)
                    new, since = [one for one in self._changes if one[0] > since], self._version
                if since == self._forgotten:
                    await answer.write(b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n')
                    return answer
                for _, kind, pod in new:
                    if selects(selector, pod):
                        await answer.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
        finally:
            self.watchers -= 1


def selects(selector: dict[str, str], pod: dict) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()
