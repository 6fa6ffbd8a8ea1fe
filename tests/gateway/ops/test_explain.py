"""`hitherto explain`: a decision as data and as text, from a running gateway or worked out alone."""

import asyncio
import json
import socket
import threading

import aiohttp
import pytest
from aiohttp import web

from gateway import cli
from gateway.errors import ApiError
from gateway.model import model_dir
from gateway.ops import explain
from gateway.settings import ADMIN_SIDE, ConfigError, Settings
from replicas.simulated.model import sim_model_dir

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


def engine(name="sim", block_size=16, waiting=0):
    """The routes of an engine without events."""

    async def models(request):
        return web.json_response({"data": [{"id": name, "parent": None, "max_model_len": 4096}]})

    async def metrics(request):
        return web.Response(
            text=f'vllm:num_requests_waiting 0{waiting}\nvllm:cache_config_info{{block_size="{block_size}",num_gpu_blocks="100"}} 1\n'
        )

    async def health(request):
        return web.Response()

    return [web.get("/health", health), web.get("/v1/models", models), web.get("/metrics", metrics)]


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


async def test_flags_that_the_running_gateway_does_not_follow_are_named(listen, empty_folder, capsys):
    async def answer(request):
        return web.json_response(decision(), headers={ADMIN_SIDE: "1"})

    async def status(request):
        replicas = [{"id": "a:1", "url": "http://a:1"}, {"id": "b:1", "url": "http://b:1"}]
        return web.json_response({"policy": "least_time", "replicas": replicas, "spaces": [{"block_size": 16}]})

    url = await listen(web.post("/explain", answer), web.get("/status", status))
    (empty_folder / "body.json").write_bytes(CHAT)
    ask = "body.json", "--admin", url, "--json"
    for flags, said in (
        (("--policy", "round_robin"), "--policy round_robin does not count"),
        (("--replica-url", "http://a:1", "http://c:1"), "--replica-url http://c:1 does not count"),
        (("--block-size", "32", "--policy", "random"), "--policy random and --block-size 32 do not count"),
        (
            ("--block-size", "32", "--policy", "random", "--replica-url", "http://c:1", "http://d:1"),
            "--policy random, --replica-url http://c:1 http://d:1 and --block-size 32 do not count",
        ),
    ):
        assert await in_thread(*ask, *flags) == 0
        out, err = capsys.readouterr()
        assert err == f"the running gateway answers, with its own settings: {said}\n\n"
        assert json.loads(out)["choice"] == "b:1"
    (empty_folder / "hitherto.yaml").write_text("policy: random\nblock_size: 16\n")
    same = "--policy", "least_time", "--replica-url", "http://b:1", "--block-size", "16", "--port", "28080"
    assert await in_thread(*ask, *same, "--max-body-bytes", "4MiB") == 0
    assert capsys.readouterr().err == ""
    assert await in_thread(*ask) == 0
    assert "its own settings: file hitherto.yaml:1: policy random does not count\n" in capsys.readouterr().err


async def test_the_gateways_refusal_is_passed_on(listen, empty_folder, capsys):
    async def refuse(request):
        return web.json_response(
            {"error": {"message": "'messages' is missing", "type": "t", "param": None, "code": None}},
            status=400,
            headers={ADMIN_SIDE: "0"},
        )

    url = await listen(web.post("/explain", refuse))
    (empty_folder / "body.json").write_bytes(b"{}")
    assert await in_thread("body.json", "--admin", url) == 1
    assert capsys.readouterr().err == "hitherto: this request would be answered with 400: 'messages' is missing\n"
    (empty_folder / "body.json").write_bytes(b"What is the sum?")
    assert await in_thread("body.json", "--admin", url) == 1
    assert "\nbody.json has no JSON. Give a body as a client would send it: " in capsys.readouterr().err


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


async def test_something_else_on_that_port_is_no_gateway(listen, empty_folder, capsys):
    (empty_folder / "body.json").write_bytes(CHAT)
    url = await listen()
    assert await in_thread("body.json", "--admin", url) == 2
    said = "what answers there, with status 404, is no gateway's admin side. Give the admin side's URL"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 404])
async def test_an_engines_error_is_no_verdict_and_its_refusal_not_the_admin_sides(listen, empty_folder, capsys, status):
    """Nor is one of the clients' side of a gateway with keys: all have OpenAI's shape."""

    async def refuse(request):
        error = {"message": "Not Found", "type": "NotFoundError", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    (empty_folder / "body.json").write_bytes(CHAT)
    url = await listen(web.post("/explain", refuse))
    assert await in_thread("body.json", "--admin", url) == 2
    said = f"what answers there, with status {status}, is no gateway's admin side. Give the admin side's URL"
    assert capsys.readouterr().err.startswith(f"hitherto: --admin {url}: {said}")


@pytest.mark.parametrize(
    "url",
    [
        "gw:8081",
        "http://gw:abc",
        "http://[::1",
        "http://g w:8081",
        "http://",
        "http://gw:99999",
        "http://a@gw:1",
        "http://..:1",
    ],
)
def test_what_is_no_url_is_no_gateway(empty_folder, capsys, url):
    (empty_folder / "body.json").write_bytes(CHAT)
    assert cli.main(["explain", "body.json", "--admin", url]) == 2
    assert capsys.readouterr().err.startswith(f"hitherto: --admin {url}: it is no URL: write http://HOST:PORT")


@pytest.mark.parametrize(
    "reply, said",
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "something else answers there"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "something else answers there"),
        (
            b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n{",
            "what answers there, with status 500, is no gateway's admin side",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "its answer breaks off"),
        (b"", "it closes the connection without an answer"),
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
    assert capsys.readouterr().err.startswith(f"hitherto: --admin {url}: {said}. Give the admin side's URL")


async def test_without_gateway_and_replicas_it_says_what_to_give(empty_folder, capsys, unused_tcp_port):
    (empty_folder / "body.json").write_bytes(CHAT)
    assert await in_thread("body.json", "--admin-port", str(unused_tcp_port)) == 2
    err = capsys.readouterr().err
    assert f"no gateway answers at http://127.0.0.1:{unused_tcp_port}" in err and "--replica-url" in err


async def test_alone_against_replicas(listen, empty_folder, capsys, unused_tcp_port):
    idle, busy = await listen(*engine()), await listen(*engine(waiting=9))
    (empty_folder / "body.json").write_bytes(CHAT)
    arguments = [
        "body.json",
        "--admin-port",
        str(unused_tcp_port),
        "--replica-url",
        idle,
        busy,
        "http://127.0.0.1:9",
        "--policy",
        "least_load",
        "--json",
    ]
    assert await in_thread(*arguments) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["choice"] == idle.removeprefix("http://") and len(told["replicas"]) == 2
    assert told["mode"] == "exact" and told["tokens"] > 100 and told["blocks"] == told["tokens"] // 16
    assert "(nothing listens there): worked out from the configuration" in err and "left out: 127.0.0.1:9: " in err


async def test_a_file_that_it_does_not_need_and_that_cannot_be_used_is_named_and_done_without(
    listen, empty_folder, capsys, unused_tcp_port
):
    (empty_folder / "body.json").write_bytes(CHAT)
    (empty_folder / "keys.yaml").write_text("- {name: team a!}")
    arguments = ["body.json", "--admin-port", str(unused_tcp_port), "--replica-url", await listen(*engine()), "--json"]
    assert await in_thread(*arguments, "--api-keys", "keys.yaml") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["mode"] == "exact"
    assert "not needed for this answer, but no gateway starts with it: flag --api-keys: keys.yaml:1: name: " in err
    assert await in_thread(*arguments, "--chat-template", "gone.jinja") == 2, "which it needs"
    assert "there is no file gone.jinja" in capsys.readouterr().err


async def test_alone_both_legs_are_named(listen, empty_folder, capsys, unused_tcp_port):
    prefiller, decoder = await listen(*engine()), await listen(*engine())
    (empty_folder / "body.json").write_bytes(CHAT)
    urls = [f"{prefiller}#role=prefill", f"{decoder}#role=decode"]
    arguments = ["body.json", "--admin-port", str(unused_tcp_port), "--policy", "round_robin", "--replica-url", *urls]
    assert await in_thread(*arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    ids = [url.removeprefix("http://") for url in (prefiller, decoder)]
    assert [told["legs"][leg] for leg in ("prefill", "decode")] == ids
    assert [one["id"] for one in told["replicas"]] == ids[1:], "a prefiller gets no whole request beside a decoder"
    assert await in_thread(*arguments) == 0
    out = capsys.readouterr().out
    assert f"legs     P {ids[0]} holds 0 tokens of it, D {ids[1]} lacks " in out and f"\nD  {ids[1]}" in out


async def test_alone_overlap_comes_from_the_engines_event_history(start_engine, empty_folder, capsys, unused_tcp_port):
    holder, other = [engine.wait() for engine in (start_engine(), start_engine())]
    (empty_folder / "body.json").write_bytes(CHAT)
    async with aiohttp.ClientSession() as session:
        async with session.post(
            holder.url + "/v1/chat/completions", data=CHAT, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 200
    arguments = ["body.json", "--admin-port", str(unused_tcp_port), "--replica-url", other.url, holder.url]
    assert await in_thread(*arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    overlap = {one["id"]: one["overlap_tokens"] for one in told["replicas"]}
    assert overlap == {
        holder.url.removeprefix("http://"): (told["tokens"] - 1) // 16 * 16,
        other.url.removeprefix("http://"): 0,
    }
    assert told["choice"] == holder.url.removeprefix("http://")
    assert await in_thread(*arguments) == 0
    assert capsys.readouterr().out.startswith(f"{told['choice']}, because it holds ")


async def test_alone_the_clients_fault_is_told(listen, empty_folder, capsys, unused_tcp_port):
    (empty_folder / "body.json").write_bytes(b'{"messages": ')
    assert (
        await in_thread("body.json", "--admin-port", str(unused_tcp_port), "--replica-url", await listen(*engine()))
        == 1
    )
    said = capsys.readouterr().err
    assert "would be answered with 400: the body is not valid JSON: " in said
    assert 'body.json has no JSON. Give a body as a client would send it: {"messages": ' in said


async def test_alone_a_path_that_no_client_may_ask_is_refused(listen, empty_folder, capsys, unused_tcp_port):
    (empty_folder / "body.json").write_bytes(CHAT)
    here = "--admin-port", str(unused_tcp_port), "--replica-url", await listen(*engine())
    assert await in_thread("body.json", "--path", "/v1/chat/completion", *here) == 1
    said = capsys.readouterr().err
    assert "would be answered with 404: " in said and "did you mean /v1/chat/completions?" in said
    opened = "--path", "/v1/of/ours", "--allow-path", "/v1/of/ours"
    assert await in_thread("body.json", *opened, *here) == 0


async def test_alone_with_keys_in_force_a_tenant_may_not_say_where_caches_go(listen, tmp_path):
    (keys := tmp_path / "keys.yaml").write_text(f"- {{name: a, sha256: {'ab' * 32}}}\n")
    settings = Settings(model="sim", replica_url=(await listen(*engine()),))
    for path in ("/v1/chat/completions", "/v1/rerank"):
        body = json.dumps({**json.loads(CHAT), "kv_transfer_params": {"do_remote_decode": True}}).encode()
        assert (await explain.alone(settings, path, body))["choice"]
        with_keys = settings.model_copy(update={"api_keys": keys})
        with pytest.raises(ApiError, match="'kv_transfer_params' may not come with a request here") as refused:
            await explain.alone(with_keys, path, body)
        assert (refused.value.status, refused.value.code) == (400, "field_not_allowed")
        assert (await explain.alone(with_keys, path, CHAT))["choice"]


async def test_alone_what_is_passed_on_goes_to_replicas_of_its_model(listen):
    settings = Settings(model="sim", replica_url=(await listen(*engine()), ranker := await listen(*engine("ranker"))))
    for _ in range(2):
        told = await explain.alone(settings, "/v1/rerank", b'{"model": "ranker", "query": "x"}')
        assert (told["model"], told["choice"], told["mode"]) == ("ranker", ranker.removeprefix("http://"), "load")
    with pytest.raises(ApiError, match="'nobody' does not exist"):
        await explain.alone(settings, "/v1/rerank", b'{"model": "nobody", "query": "x"}')


async def test_alone_a_url_of_no_engine_keeps_no_model_from_being_unknown(listen, capsys):
    settings = Settings(model="sim", replica_url=(await listen(*engine()), await listen()))
    with pytest.raises(ApiError, match="'nobody' does not exist") as refused:
        await explain.alone(settings, "/v1/chat/completions", CHAT.replace(b'"sim"', b'"nobody"'))
    assert refused.value.status == 404 and "/health answers 404" in capsys.readouterr().err


async def test_alone_a_model_that_an_engine_may_serve_which_is_down_is_not_unknown(listen, unused_tcp_port):
    settings = Settings(model="sim", replica_url=(await listen(*engine()), f"http://127.0.0.1:{unused_tcp_port}"))
    asked = {
        "/v1/chat/completions": CHAT.replace(b'"sim"', b'"nobody"'),
        "/v1/rerank": b'{"model": "nobody", "query": "x"}',
    }
    for path, body in asked.items():
        with pytest.raises(ApiError, match=f"127.0.0.1:{unused_tcp_port}: nothing listens there") as refused:
            await explain.alone(settings, path, body)
        assert refused.value.status == 503


async def test_alone_with_no_replica_up(unused_tcp_port):
    with pytest.raises(ConfigError, match="no replica answers"):
        await explain.alone(Settings(replica_url=(f"http://127.0.0.1:{unused_tcp_port}",)), "/v1/completions", b"{}")


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


def test_model_names_are_resolved_or_refused(tmp_path):
    assert model_dir("sim") == sim_model_dir()
    assert model_dir(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="no directory /nowhere/at/all"):
        model_dir("/nowhere/at/all")
    with pytest.raises(ConfigError, match="Give --model NAME_OR_FOLDER"):
        model_dir(None)


def test_refusals_of_other_servers_are_not_taken_for_the_gateways():
    import io
    import urllib.error
    from email.message import Message

    headers = Message()
    headers[ADMIN_SIDE] = "0"
    page = urllib.error.HTTPError("u", 500, "x", headers, io.BytesIO(b"<html>"))
    assert isinstance(explain._refusal(page, "http://a"), explain.Unanswered)
    told = b'{"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}'
    ours = urllib.error.HTTPError("u", 404, "x", headers, io.BytesIO(told))
    wrong = explain._refusal(ours, "http://a")
    assert isinstance(wrong, ApiError) and (wrong.status, wrong.message, wrong.code) == (404, "m", "c")
