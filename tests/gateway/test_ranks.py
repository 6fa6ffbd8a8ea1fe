"""An engine with data-parallel ranks behind one URL: two simulated engines, and in front of them what makes vLLM's
ranks one server, so that tokens, caches, events and reports are real and each rank's own."""

import asyncio
import re

import aiohttp
import pytest
from aiohttp import web

from .running import reported, running

RANK = "X-data-parallel-rank"
LABEL = re.compile(r'engine="\d+"')


class Ranks:
    """One URL for several engines, as vLLM does it: a header chooses, metrics are labelled, event sources listed."""

    def __init__(self, urls: list[str], session: aiohttp.ClientSession):
        self.urls, self.session, self.count = urls, session, len(urls)
        self.started, self.seen, self.locked = 1000.0, [], False
        self.next = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(text=await self.metrics())
        if request.path == "/kv_event_sources":
            return web.json_response(
                {str(rank): (await self.ask(rank, "/kv_event_sources"))["0"] for rank in range(self.count)}
            )
        body = await request.read()
        # the gateway's own question, which any rank answers alike
        if request.method == "POST" and request.path != "/tokenize":
            self.seen.append((request.path, request.headers.getall(RANK, [])))
        rank = int(request.headers.get(RANK, -1)) if request.path != "/v1/responses" else -1
        if rank >= self.count:
            return web.json_response({"error": {"message": f"data_parallel_rank {rank} is out of range"}}, status=400)
        if rank < 0:  # the one it likes
            self.next = rank = (self.next + 1) % self.count
        async with self.session.request(
            request.method, self.urls[rank] + request.path, data=body, headers={"Content-Type": "application/json"}
        ) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)

    async def ask(self, rank: int, path: str) -> dict:
        async with self.session.get(self.urls[rank] + path) as reply:
            return await reply.json()

    async def metrics(self) -> str:
        page = [f"process_start_time_seconds {self.started}"]
        for rank in range(self.count):
            async with self.session.get(self.urls[rank] + "/metrics") as reply:
                lines = (await reply.text()).splitlines()
            page += [
                LABEL.sub(f'engine="{rank}"', line) for line in lines if not line.startswith(("process_start", "#"))
            ]
        return "\n".join(page) + "\n"


@pytest.fixture(scope="module")
def engines(start_engine):
    return [engine.wait().url for engine in [start_engine("--lora", "sql"), start_engine("--lora", "sql")]]


@pytest.fixture
async def ranks(engines):
    async with aiohttp.ClientSession() as session:
        front = Ranks(engines, session)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", front.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        front.id = f"127.0.0.1:{runner.addresses[0][1]}"
        yield front
        await runner.cleanup()


def text(name: str) -> str:
    return f"This is what {name} has to say about the matter. " * 40


async def ask(gateway, name: str, **fields):
    headers = {RANK: "7"}  # a client's own is not for it to choose
    body = {"model": "sim", "prompt": text(name), "max_tokens": 2, **fields}
    answer = await gateway.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def heard(gateway, count: int):
    return await gateway.until(
        lambda status: [one["events"] for one in status["replicas"] if one["state"] == "ready"] == ["live"] * count
    )


async def test_prompts_find_the_rank_that_holds_them_and_the_engine_agrees(ranks):
    async with running("--replica-url", f"http://{ranks.id}", "--model", "sim") as gateway:
        status = await heard(gateway, 2)
        assert [(one["id"], one["rank"]) for one in status["replicas"]] == [
            (f"{ranks.id}-dp0", 0),
            (f"{ranks.id}-dp1", 1),
        ]
        assert all(one["adapters"] == {"sql": "sim"} and not one["problems"] for one in status["replicas"])
        homes: dict[str, set] = {}
        # at first all at once, so that both ranks get some; then one by one, so that none has to make way
        for turn in range(3):
            asked = [ask(gateway, name) for name in "abcdefgh"]
            answers = [await one for one in asked] if turn else await asyncio.gather(*asked)
            for name, answer in zip("abcdefgh", answers):
                assert int(answer.headers["x-hitherto-cached-tokens"]) == reported(answer)
                homes.setdefault(name, set()).add(answer.headers["x-hitherto-replica"])
        assert all(len(where) == 1 for where in homes.values()) and set.union(*homes.values()) == {
            f"{ranks.id}-dp0",
            f"{ranks.id}-dp1",
        }
        assert all(len(given) == 1 and given[0] in "01" for path, given in ranks.seen)
        answer = await ask(gateway, "a", model="sql")  # an adapter's blocks are not the base model's
        assert reported(answer) == 0 == int(answer.headers["x-hitherto-cached-tokens"])
        answer = await ask(gateway, "a", model="sql")
        assert reported(answer) == int(answer.headers["x-hitherto-cached-tokens"]) > 0
        explained = (
            await gateway.admin.post(
                "/explain", params={"path": "/v1/completions"}, json={"model": "sim", "prompt": text("a")}
            )
        ).json()
        assert {one["id"] for one in explained["replicas"]} == set.union(*homes.values()) and explained[
            "choice"
        ] in homes["a"]


async def test_one_rank_is_drained_the_engine_comes_back_with_one_and_with_two(ranks):
    async with running("--replica-url", f"http://{ranks.id}", "--model", "sim") as gateway:
        await heard(gateway, 2)
        assert (await gateway.admin.post(f"/replicas/{ranks.id}-dp0/drain")).status_code == 202
        await gateway.until(lambda status: status["replicas"][0]["state"] == "stopped")
        ranks.seen.clear()
        for name in "abcd":
            await ask(gateway, name)
        assert {given[0] for path, given in ranks.seen} == {"1"}
        refused = await gateway.admin.delete(f"/replicas/{ranks.id}-dp0")
        assert refused.status_code == 409 and f"remove {ranks.id}" in refused.json()["error"]["message"]
        for count, ids in ((1, [ranks.id]), (2, [f"{ranks.id}-dp0", f"{ranks.id}-dp1"])):
            ranks.count, ranks.started = count, ranks.started + 1
            await gateway.until(
                lambda status, ids=ids: [one["id"] for one in status["replicas"] if one["events"] == "live"] == ids
            )
            ranks.seen.clear()
            answer = (
                await ask(gateway, "a")
                if count > 1
                else await gateway.client.post("/v1/completions", json={"model": "sim", "prompt": text("a")})
            )
            assert answer.headers["x-hitherto-replica"] in ids and answer.status_code == 200
            assert ranks.seen[0][1] == ([] if count == 1 else [answer.headers["x-hitherto-replica"][-1]])
        assert (await gateway.admin.delete(f"/replicas/{ranks.id}")).status_code == 200
        assert (await gateway.status())["replicas"] == []
