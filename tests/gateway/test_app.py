"""The whole house: a gateway process, engines below it, requests over real sockets."""

import asyncio
import fcntl
import os
import pty
import resource
import signal
import sys
import termios
from contextlib import asynccontextmanager

import httpx
import pytest

from .http.talk import Talker
from .running import alive, counted, predicted, reported, running

SYSTEM = {"role": "system", "content": "You answer questions about the standard library. " * 40}


def user(text):
    return {"role": "user", "content": text}


async def test_a_request_reaches_the_replica_that_holds_its_prefix_and_the_engine_agrees():
    async with running("--launch", "3") as gateway:
        await gateway.ready(3)
        homes = {}
        for turn in range(4):
            for name in "abcdef":
                messages = [SYSTEM, user(f"I am {name}. " * 50)]
                for k in range(turn):
                    messages += [{"role": "assistant", "content": f"Noted {k}."}, user(f"And then {k}?")]
                answer = await gateway.chat(messages)
                assert answer.status_code == 200, answer.text
                assert predicted(answer) == reported(answer)
                if turn:
                    assert answer.headers["x-hitherto-replica"] == homes[name]
                    assert predicted(answer) > 400
                homes[name] = answer.headers["x-hitherto-replica"]
        status = await gateway.status()
        assert status["totals"]["inflight"] == 0
        assert status["totals"]["prompts"] == {"exact": 24}
        assert {one["events"] for one in status["replicas"]} == {"live"}
        metrics = (await gateway.admin.get("/metrics")).text
        assert "hitherto_reservations 0.0" in metrics
        assert counted(metrics, "hitherto_predictions_total", outcome="over") == 0
        assert counted(metrics, "hitherto_predictions_total", outcome="under") == 0


async def test_every_endpoint_goes_through_with_exact_tokens():
    async with running("--launch", "1") as gateway:
        await gateway.ready(1)
        text = "All the world's a stage, and all the men and women merely players. " * 30
        bodies = {
            "/v1/chat/completions": {"messages": [user(text)], "max_tokens": 2},
            "/v1/completions": {"prompt": text, "max_tokens": 2},
            "/v1/responses": {"input": text, "max_output_tokens": 2},
            "/v1/messages": {"messages": [user(text)], "max_tokens": 2},
            "/v1/embeddings": {"input": text},
            "/tokenize": {"prompt": text},
            "/detokenize": {"tokens": [100, 200, 300]},
        }
        for path, body in bodies.items():
            answer = await gateway.client.post(path, json={"model": "sim", **body})
            assert answer.status_code == 200, (path, answer.text)
            assert "x-hitherto-replica" in answer.headers
        again = (await gateway.client.post("/v1/messages", json={"model": "sim", **bodies["/v1/messages"]})).json()[
            "usage"
        ]
        assert again["cache_read_input_tokens"] > 300 > again["input_tokens"]
        metrics = (await gateway.admin.get("/metrics")).text
        for wrong in ("over", "under"):
            assert counted(metrics, "hitherto_predictions_total", outcome=wrong) == 0
        assert (await gateway.client.get("/version")).status_code == 200
        assert [one["id"] for one in (await gateway.client.get("/v1/models")).json()["data"]] == ["sim"]


@pytest.mark.parametrize("sizes", [(300, 120), (120, 300)], ids=["smaller", "larger"])
async def test_an_engine_without_events_that_restarts_with_another_cache_is_modelled_with_that(start_engine, sizes):
    """Five prompts of 30 blocks fill the smaller cache, so the first one is gone there, and held in the larger one."""
    flags = ("--no-events", "--max-model-len", "1024", "--num-blocks")
    engine = start_engine(*flags, str(sizes[0])).wait()
    async with running("--model", "sim", "--replica-url", engine.url) as gateway:
        for size in sizes:
            if engine.process.poll() is not None:
                engine = start_engine(*flags, str(size), "--port", str(engine.port)).wait()
            await gateway.until(
                lambda status: [one["num_blocks"] for one in status["replicas"] if one["state"] == "ready"] == [size]
            )
            for number in (1, 2, 3, 4, 5, 1):
                answer = await gateway.chat([user(f"{number} says what nobody else does. " * 60)])
                assert answer.status_code == 200 and predicted(answer) == reported(answer), size
            assert (predicted(answer) > 400) == (size > 150)
            assert (await gateway.status())["replicas"][0]["map_blocks"] <= size
            engine.process.terminate()
            engine.process.wait()


async def test_an_adapter_is_served_from_the_moment_it_is_loaded_and_has_blocks_of_its_own(start_engine):
    engine = start_engine().wait()
    async with running("--model", "sim", "--replica-url", engine.url) as gateway:
        await gateway.ready(1)
        prompt = [SYSTEM, user("Who goes there? " * 40)]
        assert predicted(await gateway.chat(prompt)) == 0
        refused = await gateway.client.post("/v1/chat/completions", json={"model": "sql", "messages": prompt})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")

        async def load(name: str) -> None:
            async with httpx.AsyncClient(base_url=engine.url) as direct:
                told = {"lora_name": name, "lora_path": f"/{name}"}
                assert (await direct.post("/v1/load_lora_adapter", json=told)).status_code == 200

        await load("sql")
        answers = [
            await gateway.client.post(
                "/v1/chat/completions", json={"model": "sql", "messages": prompt, "max_tokens": 2}
            )
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert predicted(answers[0]) == reported(answers[0]) == 0 < predicted(answers[1]) == reported(answers[1])
        for path in ("/explain", "/decide"):
            await load(path[1:])
            asked = await gateway.admin.post(path, json={"model": path[1:], "messages": prompt})
            assert asked.status_code == 200, (path, asked.text)


@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "two workers"])
async def test_the_usual_limit_of_open_files_does_not_limit_connections(start_engine, flags):
    engine = start_engine().wait()
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))  # the gateway's when it starts
    try:
        started = running("--model", "sim", "--replica-url", engine.url, *flags)
        gateway = await started.__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
    try:
        await gateway.ready(1)
        talkers = [await Talker.to(gateway.client.base_url.port) for _ in range(600)]
        for talker in talkers:
            await talker.say(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert {(await talker.response(20))[0] for talker in talkers} == {200}
        for talker in talkers:
            await talker.close()
    finally:
        await started.__aexit__(None, None, None)


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HELLO = b'{"model":"sim","prompt":"Who goes there?","max_tokens":2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@asynccontextmanager
async def with_few_files(engine, *flags: str):
    """A gateway that may open a hundred files more than it has."""
    async with running("--model", "sim", "--replica-url", engine.url, *flags) as gateway:
        await gateway.ready(1)
        pid, talkers = gateway.process.pid, []
        most = max(int(number) for number in os.listdir(f"/proc/{pid}/fd")) + 100
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))

        async def talk() -> Talker:
            talkers.append(await Talker.to(gateway.client.base_url.port))
            return talkers[-1]

        try:
            yield gateway, talk
        finally:
            for talker in talkers:
                await talker.close()


async def test_idle_connections_give_way_where_files_become_short(start_engine):
    async with with_few_files(start_engine().wait()) as (gateway, talk):
        talkers = []
        for _ in range(300):
            talkers.append(await talk())
            await talkers[-1].say(HEALTH)
            assert (await talkers[-1].response(20))[0] == 200
        assert await talkers[0].rest(20) == b""  # the oldest gave way
        for talker in talkers[-20:]:
            await talker.say(POST % len(HELLO) + HELLO)  # each needs a file for its replica
        assert {(await talker.response(20))[0] for talker in talkers[-20:]} == {200}
        assert b"".join(gateway.log).count(b"idle connections of clients are closed") == 1
        assert gateway.log and (await gateway.status())["background_failures"] == {}
        assert await gateway.counted("hitherto_rejections_total", reason="503") == 0


async def test_where_files_are_short_and_no_connection_is_idle_a_new_one_is_refused_and_said(start_engine):
    async with with_few_files(start_engine().wait()) as (gateway, talk):
        busy, refused = [], 0
        while refused < 150:  # more than there are files
            talker = await talk()
            await talker.say(HEALTH)
            status, headers, body = await talker.response(20)
            if status == 200:
                busy.append(talker)
                await talker.say(POST % len(HELLO) + HELLO[:10])
            else:
                assert status == 503 and headers["retry-after"] == "1" and b"gateway_full" in body
                assert headers["connection"] == "close" and await talker.rest(20) == b""
                refused += 1  # its client does not close its side
        assert b"gateway_full" in await (await talk()).rest(20)  # also one that asks nothing
        refused += 1
        told = (await gateway.status())["background_failures"]["connections of clients"]
        assert told["failures"] == refused and "raise the limit" in told["last"]
        assert await gateway.counted("hitherto_rejections_total", reason="503") == refused
        # Of the reserve, 33 files, those that were refused and are not closed yet take 8, the gateway's own work some.
        for talker in busy[-10:]:
            await talker.say(HELLO[10:])
        answers = [await talker.response(20) for talker in busy[-10:]]
        assert {status for status, *_ in answers} == {200}, [one for one in answers if one[0] != 200][:2]
        status = 503
        while status == 503:  # until files of those that were answered are free
            newer = await talk()
            await newer.say(HEALTH)
            status = (await newer.response(20))[0]
        assert status == 200


async def test_a_stream_in_progress_is_finished_before_the_gateway_stops():
    async with running("--launch", "1") as gateway:
        await gateway.ready(1)
        child = (await gateway.status())["replicas"][0]["pid"]
        body = {"model": "sim", "messages": [user("Count.")], "max_tokens": 100, "stream": True, "ignore_eos": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            gateway.process.send_signal(signal.SIGTERM)
            while True:  # refused from the moment the signal is taken
                refused = await gateway.chat([user("Me too?")])
                if refused.status_code == 503:
                    break
            assert refused.headers["retry-after"] and refused.json()["error"]["code"] == "shutting_down"
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest and sum(line.startswith("data: {") for line in rest) > 50
        assert await asyncio.wait_for(gateway.process.wait(), 15) == 0
        assert not alive(child)


@pytest.mark.parametrize("flags", [(), ("--workers", "2")])
async def test_sighup_without_a_terminal_says_that_it_changes_nothing(flags):
    async with running("--launch", "1", *flags) as gateway:
        child = (await gateway.ready(1))["replicas"][0]["pid"]
        workers = [one["pid"] for one in (await gateway.status()).get("workers", ())]
        for pid in (*workers, gateway.process.pid):
            os.kill(pid, signal.SIGHUP)
        while not any(b"SIGHUP is ignored: settings are read at the start alone" in line for line in gateway.log):
            await asyncio.sleep(0.02)
        assert (await gateway.chat([user("Still here?")])).status_code == 200
        assert all(map(alive, [child, *workers]))


async def test_a_terminal_that_is_closed_lets_running_requests_end():
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"),
        *("--replica-url", "http://127.0.0.1:9"),
        stdin=theirs,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    try:
        while b" serves http" not in await asyncio.wait_for(process.stderr.readline(), 60):
            pass
        os.close(ours)  # the kernel sends SIGHUP
        rest = await asyncio.wait_for(process.stderr.read(), 15)
        assert await process.wait() == 0 and b"stopping: new requests are refused" in rest
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_gateway_that_is_killed_leaves_no_engine_behind():
    async with running("--launch", "2") as gateway:
        children = [one["pid"] for one in (await gateway.ready(2))["replicas"]]
        gateway.process.kill()
        await gateway.process.wait()
        end = asyncio.get_running_loop().time() + 10
        while any(map(alive, children)):
            assert asyncio.get_running_loop().time() < end, "an engine outlived its gateway"
            await asyncio.sleep(0.05)


async def test_killing_a_replica_under_load_fails_no_request_and_it_comes_back():
    async with running("--launch", "2") as gateway:
        victim = (await gateway.ready(2))["replicas"][0]
        seen, stop = [], asyncio.Event()

        async def client(name):
            count = 0
            while not stop.is_set():
                count += 1
                answer = await gateway.chat([SYSTEM, user(f"{name} asks {count}. " * 20)])
                seen.append((answer.status_code, answer.headers.get("x-hitherto-replica"), answer.text))

        clients = [asyncio.create_task(client(name)) for name in "abcd"]
        await gateway.until(lambda status: victim["id"] in {replica for _, replica, _ in seen})
        os.kill(victim["pid"], signal.SIGKILL)
        await gateway.until(
            lambda status: next(one for one in status["replicas"] if one["id"] == victim["id"])["state"] != "ready"
        )
        await gateway.ready(2)
        mark = len(seen)
        await gateway.until(lambda status: victim["id"] in {replica for _, replica, _ in seen[mark:]})
        stop.set()
        await asyncio.gather(*clients)
        assert [one for one in seen if one[0] != 200] == []
        assert (await gateway.status())["totals"]["inflight"] == 0


@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "two workers"])
async def test_a_model_by_any_name_is_found_where_the_engine_has_it_from(start_engine, flags):
    engine = start_engine("--served-model-name", "support-bot").wait()
    async with running("--replica-url", engine.url, *flags) as gateway:
        await gateway.until(lambda status: status["ready"])
        assert (await gateway.chat([SYSTEM, user("Hello?")], model="support-bot")).status_code == 200
        status = await gateway.until(lambda status: status["totals"]["prompts"])
        assert status["totals"]["prompts"] == {"exact": 1}


async def test_a_gateway_starts_before_its_engines_and_says_what_it_waits_for():
    async with running("--model", await bundled(), "--replica-url", "http://127.0.0.1:9") as gateway:
        answer = await gateway.chat([user("Anybody?")])
        assert answer.status_code == 503 and "127.0.0.1:9" in answer.json()["error"]["message"]
        ready = await gateway.admin.get("/readyz")
        assert ready.status_code == 503 and "127.0.0.1:9" in ready.text
        assert (await gateway.admin.get("/livez")).status_code == 200


async def bundled() -> str:
    from replicas.simulated.model import sim_model_dir

    return str(sim_model_dir())
