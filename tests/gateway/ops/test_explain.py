"""`hitherto explain`: a running gateway's decision as data and as text."""

import asyncio
import json
import socket
import threading

import pytest
from aiohttp import web

from gateway import cli
from gateway.settings import ADMIN_SIDE

from .decided import BUSY, decided, replica

CHAT = b'{"model": "sim", "messages": [{"role": "user", "content": "' + b"a story about the sea " * 40 + b'"}]}'


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def decision():
    return decided("least_time", replica("a:1"), replica("b:1", 960, BUSY, lower=(("cpu", 32),)))


@pytest.fixture
async def listen():
    """Start an aiohttp app; gives its URL."""
    runners = []

    async def start(*routes) -> str:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def in_thread(*arguments):
    return asyncio.to_thread(cli.main, ["explain", *arguments])


async def test_a_running_gateway_is_asked(listen, empty_folder, capsys):
    asked = []

    async def answer(request):
        asked.append((request.query["path"], await request.read()))
        return web.json_response(decision(), headers={ADMIN_SIDE: "1"})

    url = await listen(web.post("/explain", answer))
    (empty_folder / "body.json").write_bytes(CHAT)
    assert await in_thread("body.json", "--admin", url, "--path", "/v1/completions", "--json") == 0
    assert asked == [("/v1/completions", CHAT)]
    assert json.loads(capsys.readouterr().out)["choice"] == "b:1"


async def test_the_gateways_refusal_is_passed_on(listen, empty_folder, capsys):
    async def refuse(request):
        error = {"message": "'messages' is missing", "type": "t", "param": None, "code": None}
        return web.json_response({"error": error}, status=400, headers={ADMIN_SIDE: "0"})

    url = await listen(web.post("/explain", refuse))
    (empty_folder / "body.json").write_bytes(b"{}")
    assert await in_thread("body.json", "--admin", url) == 1
    assert capsys.readouterr().err == "hitherto: this request would be answered with 400: 'messages' is missing\n"


async def test_a_token_that_cannot_be_read_is_named_where_the_gateway_wants_one(listen, empty_folder, capsys):
    async def refuse(request):
        assert "Authorization" not in request.headers
        error = {"message": "this page needs the admin token", "type": "t", "param": None, "code": "admin_token"}
        return web.json_response({"error": error}, status=401, headers={ADMIN_SIDE: "0"})

    url = await listen(web.post("/explain", refuse))
    (empty_folder / "body.json").write_bytes(CHAT)
    assert await in_thread("body.json", "--admin", url, "--admin-token", "@gone") == 2
    err = capsys.readouterr().err
    assert f"the admin side at {url} refuses: this page needs the admin token" in err
    assert "flag --admin-token: " in err and "gone" in err
    assert await in_thread("body.json", "--admin", url) == 2
    assert "--admin-token" not in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 404])
async def test_an_engines_error_is_no_verdict_and_its_refusal_not_the_admin_sides(listen, empty_folder, capsys, status):
    """Nor is one of the clients' side of a gateway with keys: all have OpenAI's shape."""

    async def refuse(request):
        error = {"message": "Not Found", "type": "NotFoundError", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    (empty_folder / "body.json").write_bytes(CHAT)
    url = await listen(web.post("/explain", refuse))
    assert await in_thread("body.json", "--admin", url) == 2
    said = (
        f"no gateway answers at {url} (what answers there, with status {status}, is no gateway's admin side). Start one"
    )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", "gw:8081 http://gw:abc http://[::1 http:// http://gw:99999 http://a@gw:1 http://..:1".split(" ")
)
def test_what_is_no_url_is_no_gateway(empty_folder, capsys, url):
    (empty_folder / "body.json").write_bytes(CHAT)
    assert cli.main(["explain", "body.json", "--admin", url]) == 2
    assert "it is no URL: write http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    "reply, said",
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "something else answers there"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "something else answers there"),
        (
            b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n{",
            "what answers there, with status 500, is no gateway's admin side",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "something else answers there"),
        (b"", "something else answers there"),
    ],
)
def test_an_answer_that_is_no_gateways_is_told_in_words(empty_folder, capsys, reply, said):
    (empty_folder / "body.json").write_bytes(CHAT)

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


async def test_without_a_gateway_it_says_what_to_do(empty_folder, capsys, unused_tcp_port):
    (empty_folder / "body.json").write_bytes(CHAT)
    arguments = "body.json", "--admin-port", str(unused_tcp_port), "--replica-url", "http://a:1"
    assert await in_thread(*arguments) == 2
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


async def test_a_path_that_is_no_text_is_the_gateways_to_refuse(listen, empty_folder, capsys):
    async def refuse(request):
        assert request.query_string == "path=/%FF"
        body = {"error": {"message": "no such path", "type": "x", "param": None, "code": None}}
        return web.json_response(body, status=404, headers={ADMIN_SIDE: "1"})

    url = await listen(web.post("/explain", refuse))
    (empty_folder / "body.json").write_bytes(CHAT)
    assert await in_thread("body.json", "--admin", url, "--path", "/\udcff") == 1
    assert "no such path" in capsys.readouterr().err
