"""`hitherto explain`: a running gateway's decision as data and as text."""

import asyncio
import json
import socket
import threading
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway import cli
from gateway.settings import ADMIN_SIDE

from .decided import BUSY, decided, replica

CHAT = b'{"model": "sim", "messages": [{"role": "user", "content": "' + b"a story about the sea " * 40 + b'"}]}'


@pytest.fixture(autouse=True)
def body_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "body.json").write_bytes(CHAT)


def decision():
    return decided("least_time", replica("a:1"), replica("b:1", 960, BUSY, lower=(("cpu", 32),)))


def error(message, code=None):
    return {"error": {"message": message, "type": "t", "param": None, "code": code}}


@asynccontextmanager
async def answering(told: dict, status: int = 200, is_gateway: bool = True):
    """What answers POST /explain with this: its URL, and what it was asked."""
    asked = []

    async def answer(request):
        asked.append((request.query_string, request.headers, await request.read()))
        return web.json_response(told, status=status, headers={ADMIN_SIDE: "1"} if is_gateway else {})

    app = web.Application()
    app.router.add_post("/explain", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), asked


def in_thread(*arguments):
    return asyncio.to_thread(cli.main, ["explain", *arguments])


async def test_a_running_gateway_is_asked(capsys):
    async with answering(decision()) as (url, asked):
        assert await in_thread("body.json", "--admin", url, "--path", "/v1/completions", "--json") == 0
    [(query, _, body)] = asked
    assert (query, body) == ("path=/v1/completions", CHAT)
    assert json.loads(capsys.readouterr().out)["choice"] == "b:1"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/\udcff"], ids=["known", "no text"])
async def test_the_gateways_refusal_is_passed_on(capsys, path):
    async with answering(error("'messages' is missing"), 400) as (url, asked):
        assert await in_thread("body.json", "--admin", url, "--path", path) == 1
    assert capsys.readouterr().err == "hitherto: this request would be answered with 400: 'messages' is missing\n"
    assert asked[0][0] == ("path=/%FF" if path == "/\udcff" else "path=/v1/chat/completions")


async def test_a_token_that_cannot_be_read_is_named_where_the_gateway_wants_one(capsys):
    async with answering(error("this page needs the admin token", "admin_token"), 401) as (url, asked):
        assert await in_thread("body.json", "--admin", url, "--admin-token", "@gone") == 2
        err = capsys.readouterr().err
        assert f"the admin side at {url} refuses: this page needs the admin token" in err
        assert "flag --admin-token: " in err and "gone" in err
        assert await in_thread("body.json", "--admin", url) == 2
        assert "--admin-token" not in capsys.readouterr().err
    assert not any("Authorization" in headers for _, headers, _ in asked)


@pytest.mark.parametrize("status", [401, 404])
async def test_an_engines_error_is_no_verdict_and_its_refusal_not_the_admin_sides(capsys, status):
    """Nor is one of the clients' side of a gateway with keys: all have OpenAI's shape."""
    async with answering(error("Not Found", status), status, is_gateway=False) as (url, _):
        assert await in_thread("body.json", "--admin", url) == 2
    why = f"what answers there, with status {status}, is no gateway's admin side"
    assert f"no gateway answers at {url} ({why}). Start one" in capsys.readouterr().err


@pytest.mark.parametrize("url", "http://gw:abc http://[::1 http:// http://gw:99999 http://a@gw:1 http://..:1".split())
def test_what_is_no_url_is_no_gateway(capsys, url):
    assert cli.main(["explain", "body.json", "--admin", url]) == 2
    assert capsys.readouterr().err.startswith(f"hitherto: --admin {url}: ")


NO_SIDE = "what answers there, with status 500, is no gateway's admin side"


@pytest.mark.parametrize(
    "reply, said",
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "something else answers there"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "something else answers there"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n{", NO_SIDE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "something else answers there"),
        (b"", "something else answers there"),
    ],
)
def test_an_answer_that_is_no_gateways_is_told_in_words(capsys, reply, said):
    def answer():
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as request:
            while not request.peek().endswith(CHAT):
                request.read(len(request.peek()))
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert cli.main(["explain", "body.json", "--admin", url]) == 2
        thread.join()
    assert capsys.readouterr().err.startswith(f"hitherto: no gateway answers at {url} ({said}). Start one")


async def test_without_a_gateway_it_says_what_to_do(capsys, unused_tcp_port):
    assert await in_thread("body.json", "--admin-port", str(unused_tcp_port), "--replica-url", "http://a:1") == 2
    said = f"no gateway answers at http://127.0.0.1:{unused_tcp_port} (nothing listens there). Start one, or name its"
    assert said in capsys.readouterr().err


def test_body_that_is_not_there(capsys):
    assert cli.main(["explain", "gone.json"]) == 2
    assert capsys.readouterr().err.startswith("hitherto: gone.json: cannot read the request's body: No such file")


def test_a_body_without_an_end_is_not_read_on(capsys, monkeypatch):
    with open("/dev/zero") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        for name in ("/dev/full", "-"):
            assert cli.main(["explain", name]) == 2
            said = f"hitherto: {name}: cannot read the request's body: it has more than 64 MiB"
            assert capsys.readouterr().err.startswith(said)
