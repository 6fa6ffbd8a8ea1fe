"""Who may speak to the admin side: literal requests over sockets, and a real browser where there is one."""

import asyncio
import base64
import json
import os
import shutil
import signal
import tempfile
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gateway.ops.admin import Admin
from gateway.ops.guard import Guard

from ..http.talk import Talker
from .test_admin import Gateway

TOKEN = "0123456789abcdef-token"
ADD = b'{"url": "http://attacker.example:1"}'
PLANT = b"POST /replicas HTTP/1.1\r\n"


@asynccontextmanager
async def admin_side(*names: str, token: str | None = None):
    """An admin side with a replica a:1; yields `say(line, *headers, body=)`, which gives status, headers and body."""
    gateway = Gateway()
    gateway.fleet.add("http://a:1")
    admin = Admin(gateway, Guard(names, token))
    port = await admin.start("127.0.0.1", 0)

    async def say(line: str, *headers: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        talker = await Talker.to(port)
        given = [f"Content-Length: {len(body)}"] if body else []
        await talker.say("\r\n".join([line, *headers, *given, "", ""]).encode() + body)
        answer = await talker.response()
        await talker.close()
        return answer

    say.port, say.fleet = port, gateway.fleet
    try:
        yield say
    finally:
        await admin.stop()


def code(answer) -> tuple[int, str]:
    found = answer[2].partition(b'"code":"')[2].partition(b'"')[0]
    return answer[0], found.decode()


HOST = "Host: gpu-gateway:8081"
JSON = "Content-Type: application/json"


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://gpu-gateway",
        "http://gpu-gateway:9999",
        "null",
        "http://gpu-gateway:8081.evil.example",
        "",
    ],
)
async def test_a_page_of_another_origin_writes_and_reads_nothing(origin):
    """What browsers send from such a page to a host that is not localhost: no Sec-Fetch-Site."""
    async with admin_side("gpu-gateway") as say:
        for kind in (
            "text/plain;charset=UTF-8",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/json",
        ):
            assert code(
                await say("POST /replicas HTTP/1.1", HOST, f"Origin: {origin}", f"Content-Type: {kind}", body=ADD)
            ) == (403, "cross_site")
        for line in ("POST /replicas/a:1/drain HTTP/1.1", "DELETE /replicas/a:1 HTTP/1.1", "GET /status HTTP/1.1"):
            assert code(await say(line, HOST, f"Origin: {origin}")) == (403, "cross_site")
        assert set(say.fleet.replicas) == {"a:1"}


async def test_its_own_page_and_tools_may():
    async with admin_side("gpu-gateway") as say:
        for origin in ("http://gpu-gateway:8081", "HTTP://GPU-Gateway:8081"):
            assert (await say("POST /replicas HTTP/1.1", HOST, f"Origin: {origin}", JSON, body=ADD))[0] in (200, 201)
        assert (await say("POST /replicas HTTP/1.1", HOST, JSON, body=b'{"url": "http://b:1"}'))[0] == 201
        assert (await say("GET /status HTTP/1.1", HOST))[0] == 200
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            assert (await say("POST /replicas HTTP/1.1", HOST, f"Sec-Fetch-Site: {site}", JSON, body=ADD))[0] == status
        assert (await say("GET / HTTP/1.1", HOST, "Sec-Fetch-Site: cross-site"))[0] == 200, "a link from another page"
        for path in ("/replicas/a:1/engine/sleep", "/replicas/a%3A1/%65ngine/sleep"):
            for site in ("cross-site", "same-site"):
                answer = await say(f"GET {path} HTTP/1.1", HOST, f"Sec-Fetch-Site: {site}")
                assert code(answer) == (403, "cross_site"), "what an engine does on GET is its own affair"


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "Content-Type:",
        "Content-Type: text/plain",
        "Content-Type: application/x-www-form-urlencoded",
        "Content-Type: multipart/form-data; boundary=b",
    ],
)
async def test_what_a_form_can_send_is_no_write(kind):
    """A page can leave the Content-Type out, with a Blob of no type."""
    async with admin_side("gpu-gateway") as say:
        assert code(await say("POST /replicas HTTP/1.1", HOST, *filter(None, [kind]), body=ADD)) == (
            415,
            "unsupported_media_type",
        )
        if kind.endswith(("plain", "urlencoded", "=b")):
            assert (await say("POST /replicas/a:1/drain HTTP/1.1", HOST, kind))[0] == 415
        assert "attacker.example:1" not in say.fleet.replicas


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8081",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "gpu-gateway.evil.example",
        "1.2.3.4.5",
    ],
)
async def test_a_name_bound_to_our_address_by_somebody_else_reads_and_writes_nothing(host):
    async with admin_side("gpu-gateway") as say:
        for line in ("GET /replicas HTTP/1.1", "GET /metrics HTTP/1.1", "POST /replicas HTTP/1.1"):
            answer = await say(
                line, f"Host: {host}", f"Origin: http://{host}", JSON, body=ADD if "POST" in line else b""
            )
            assert code(answer) == (403, "host_not_allowed") and b"--admin-allow-host" in answer[2]


async def test_addresses_and_this_machines_names_need_no_permission():
    async with admin_side("gpu-gateway", "Admin.Example.") as say:
        for host in (
            "127.0.0.1:8081",
            "10.1.2.3",
            "[::1]:8081",
            "[fd00::7]",
            "localhost:8081",
            "LOCALHOST",
            "gpu-gateway",
            "GPU-gateway.:8081",
            "admin.example:443",
        ):
            assert (await say("GET /replicas HTTP/1.1", f"Host: {host}"))[0] == 200, host
        assert (await say("GET /livez HTTP/1.0"))[0] == 200, "HAProxy's check names no host"
        for host in ("a b", "x@localhost", "localhost:8081/", "[::1", ""):
            assert code(await say("GET /replicas HTTP/1.1", f"Host: {host}"))[0] == 400, host
        assert code(await say("GET /replicas HTTP/1.1", "Host: localhost", "Host: evil.example"))[0] == 400


async def test_with_a_token_nobody_gets_further_without():
    async with admin_side(token=TOKEN) as say:
        basic = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        for line in (
            "GET / HTTP/1.1",
            "GET /status HTTP/1.1",
            "GET /metrics HTTP/1.1",
            "POST /replicas HTTP/1.1",
            "GET /nothing HTTP/1.1",
            "POST /livez HTTP/1.1",
            "GET /livez/ HTTP/1.1",
        ):
            for wrong in (
                [],
                ["Authorization: Bearer nonsense"],
                [f"Authorization: Bearer {TOKEN}x"],
                [f"Authorization: {TOKEN}"],
                ["Authorization: Basic !!"],
                [f"Authorization: Digest {TOKEN}"],
                ["Authorization: Bearer"],
                ["Authorization: Bearer \xff"],
            ):
                answer = await say(line, "Host: localhost", *wrong)
                if "POST /livez" not in line:
                    assert code(answer) == (401, "admin_token"), (line, wrong)
                    assert answer[1]["www-authenticate"].startswith("Basic ")
        for good in (
            f"Authorization: Bearer {TOKEN}",
            f"authorization: bearer {TOKEN}",
            f"Authorization: Basic {basic}",
        ):
            assert (await say("GET /status HTTP/1.1", "Host: localhost", good))[0] == 200
        status, _, body = await say("GET /readyz HTTP/1.1", "Host: localhost")
        assert status == 503 and b"a:1" not in body, "probes carry no token, and are told no more than they need"
        assert b"a:1" in (await say("GET /readyz HTTP/1.1", "Host: localhost", good))[2]
        assert b"models" not in body
        status, _, body = await say("GET /readyz?model=secret HTTP/1.1", "Host: localhost")
        assert status == 503 and b"secret" not in body and b"a:1" not in body
        assert (await say("GET /livez HTTP/1.1", "Host: localhost"))[0] == 200


# --- a browser

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAMES = "MAP gpu-gateway 127.0.0.1, MAP evil.example 127.0.0.1"
PAGE = """<!doctype html><title>a page</title><script>
const target = "http://%(host)s:%(port)d";
const tries = [
  ["POST", "/replicas", "text/plain", '{"url": "http://attacker.example:1"}'],
  ["POST", "/replicas", "application/x-www-form-urlencoded", '{"url": "http://attacker.example:2"}'],
  ["POST", "/replicas", null, new Blob(['{"url": "http://attacker.example:3"}'])],
  ["POST", "/replicas", "application/json", '{"url": "http://attacker.example:4"}'],
  ["POST", "/replicas/a:1/drain", null, null],
  ["DELETE", "/replicas/a:1", null, null],
  ["GET", "/status", null, null],
];
(async () => {
  const told = [];
  for (const mode of ["no-cors", "cors"]) for (const [method, path, kind, body] of tries) {
    try {
      const answer = await fetch(target + path, {method, mode, body, headers: kind ? {"Content-Type": kind} : {}});
      told.push(answer.status);
    } catch (error) { told.push(-1); }
  }
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
})();
</script>"""


@asynccontextmanager
async def page_of(host: str, port: int):
    """A site whose page tries all it can against the admin side at host:port; yields its port and what the page saw."""
    told: asyncio.Future = asyncio.get_running_loop().create_future()

    async def tell(request: web.Request) -> web.Response:
        told.set_result(json.loads(await request.read()))
        return web.Response()

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=PAGE % {"host": host, "port": port}, content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/", page), web.post("/told", tell)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1], told
    finally:
        await runner.cleanup()


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium (Debian: apt-get install chromium)")
async def test_a_page_in_a_real_browser_changes_nothing_and_reads_nothing():
    """Under a host name that is not localhost, to which a browser sends no Sec-Fetch-Site."""
    async with admin_side("gpu-gateway") as say, page_of("gpu-gateway", say.port) as (port, told):
        with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
            browser = await asyncio.create_subprocess_exec(
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                f"--user-data-dir={profile}",
                f"--host-resolver-rules={NAMES}",
                "--remote-debugging-port=0",
                f"http://evil.example:{port}/",
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                seen = await asyncio.wait_for(told, 60)
            finally:
                os.killpg(browser.pid, signal.SIGKILL)
                await browser.wait()
        assert set(say.fleet.replicas) == {"a:1"} and str(say.fleet.replicas["a:1"].state) != "draining"
        assert all(status in (-1, 0) for status in seen), f"the page read an answer: {seen}"
