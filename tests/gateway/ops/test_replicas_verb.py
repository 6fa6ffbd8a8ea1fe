"""`hitherto replicas`: what an operator does with replicas, without curl, and what is said when it does not work."""

import asyncio
import json
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway import cli
from gateway.ops import admin_client, replicas_verb
from replicas import Fleet, State

from ..http.talk import eventually
from .stand_in import Gateway, served


@pytest.fixture
async def admin(monkeypatch, tmp_path):
    """The admin side of a gateway with a real fleet, of engines that are not there."""
    monkeypatch.chdir(tmp_path)
    fleet = Fleet(lambda id: 0, interval=60)
    async with served(Gateway(fleet)) as port:
        monkeypatch.setenv("HITHERTO_ADMIN_PORT", str(port))
        yield fleet
    await fleet.stop()


def hitherto(*words):
    return asyncio.to_thread(cli.main, ["replicas", *words])


async def test_replicas_are_listed_added_drained_and_removed(admin, capsys, unused_tcp_port_factory):
    first, second = (f"127.0.0.1:{unused_tcp_port_factory()}" for _ in range(2))
    assert await hitherto() == 0 and capsys.readouterr().out == "no replicas\n"
    for id in (first, second):
        assert await hitherto("add", f"http://{id}") == 0
        assert id in capsys.readouterr().out
    assert await hitherto("list") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "state", "in", "flight", "models", "reason"]
    assert [row.split()[0] for row in rows] == [first, second]
    assert await hitherto("drain", first) == 0
    assert await hitherto("remove", f"http://{second}") == 0, "its URL will do for its id"
    assert f"{second} removed" in capsys.readouterr().out.replace("http://", "")
    assert await hitherto("--json") == 0
    (left,) = json.loads(capsys.readouterr().out)["replicas"]
    assert left["id"] == first and left["state"] in ("draining", "stopped")


async def test_a_drain_of_the_last_ready_replica_of_a_model_says_so(admin, capsys, caplog, unused_tcp_port_factory):
    ids = [f"127.0.0.1:{unused_tcp_port_factory()}" for _ in range(2)]
    for replica in [admin.add(f"http://{id}") for id in ids]:
        await eventually(lambda replica=replica: replica.fault == "connect")  # it is looked at in a minute again
        replica.state, replica.models = State.READY, {"sim": None}
    assert await hitherto("drain", ids[0]) == 0 and "last ready" not in capsys.readouterr().out
    assert await hitherto("drain", ids[1]) == 0
    assert "this was the last ready replica of sim: its requests fail until" in capsys.readouterr().out
    assert f"replica {ids[1]} drained by an operator: this was the last ready replica of sim" in caplog.text


def test_what_is_amiss_with_a_replica_stands_below_the_list():
    slow = {"text": "takes 4 x as long per token as the others"}
    page = {
        "id": "a:1",
        "state": "leaving",
        "inflight": 3,
        "reason": "ends",
        "slow": slow,
        "problems": ["its engine ends"],
    }
    _, row, *below = replicas_verb.table([page]).splitlines()
    assert row.split() == ["a:1", "leaving", "3", "ends"]
    assert below == ["a:1: takes 4 x as long per token as the others", "a:1: its engine ends"]


@pytest.mark.parametrize("given", ["http://gpu3", "HTTP://GPU3:80/v1", "gpu3:80", "http://gpu3#role=prefill"])
async def test_a_url_names_the_replica_however_it_is_written(admin, capsys, given):
    assert await hitherto("drain", given) == 1
    assert "there is no replica 'gpu3:80'" in capsys.readouterr().err


async def test_another_json_server_is_no_gateway(admin, capsys):
    app = web.Application()

    async def answer(request):
        return web.json_response({"detail": "hello"})

    app.router.add_get("/replicas", answer)
    async with TestServer(app) as server:
        for words in ((), ("--json",)):
            assert await hitherto(*words, "--admin", str(server.make_url("/"))) == 2
            assert "something else answers there" in capsys.readouterr().err


async def test_what_cannot_be_done_is_said_with_its_reason(admin, capsys):
    for words, code, said in (
        (("drain", "gone:1"), 1, "there is no replica 'gone:1'; there are: none"),
        (("add", "ftp://gpu1"), 1, "ftp://gpu1"),
        (("add", "http://\udcff"), 1, "the body must be"),  # as Python has a byte that is no UTF-8
        (("remove", "http://\udcff"), 1, "there is no replica"),
        (("drain", "\udcff"), 1, "there is no replica"),
        (("add",), 2, "replicas add: give the replica's URL"),
        (("remove",), 2, "replicas remove: give the id"),
        (("list", "a:1"), 2, "replicas list: takes no replica"),
        (("dran", "a:1"), 2, "drain"),
        (("--admin", "nowhere"), 2, "--admin nowhere: there is no port in it, write http://nowhere:PORT"),
        (("--admin", "http://127.0.0.1:9"), 2, "no gateway answers at http://127.0.0.1:9"),
    ):
        assert await hitherto(*words) == code, words
        assert said in capsys.readouterr().err, words


def test_a_gateway_that_was_stopped_is_not_to_be_started_a_second_time(capsys, monkeypatch):
    """The kernel takes its connections, and nobody answers."""
    monkeypatch.setattr(admin_client, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        assert cli.main(["replicas", "--admin", f"http://127.0.0.1:{frozen.getsockname()[1]}"]) == 2
    err = capsys.readouterr().err
    assert "Something listens there and does not answer: if it is the gateway, it hangs" in err
    assert "Start one" not in err
