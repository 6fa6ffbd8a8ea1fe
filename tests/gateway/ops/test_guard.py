"""Who may speak to the admin side: literal requests over sockets."""

import base64
from contextlib import asynccontextmanager

import pytest

from gateway.ops import guard
from gateway.ops.guard import Guard

from ..http.talk import Talker
from .stand_in import Gateway, served

TOKEN = "0123456789abcdef-token"
ADD = b'{"url": "http://attacker.example:1"}'
PLANT = b"POST /replicas HTTP/1.1\r\n"


@asynccontextmanager
async def admin_side(*names: str, token: str | None = None):
    """An admin side with a replica a:1; yields `say(line, *headers, body=)`, which gives status, headers and body."""
    gateway = Gateway()
    gateway.fleet.add("http://a:1")
    async with served(gateway, Guard(names, token)) as port:

        async def say(line: str, *headers: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
            talker = await Talker.to(port)
            given = [f"Content-Length: {len(body)}"] if body else []
            answer = await talker.ask("\r\n".join([line, *headers, *given, "", ""]).encode() + body)
            await talker.close()
            return answer

        say.fleet = gateway.fleet
        yield say


def code(answer) -> tuple[int, str]:
    found = answer[2].partition(b'"code":"')[2].partition(b'"')[0]
    return answer[0], found.decode()


HOST = "Host: gpu-gateway:8081"
JSON = "Content-Type: application/json"
FORMS = [f"Content-Type: {kind}" for kind in sorted(guard.FORMS)]


@pytest.mark.parametrize(
    "origin",
    "http://evil.example https://gpu-gateway http://gpu-gateway:9999 null http://gpu-gateway:8081.evil.example ".split(
        " "
    ),
)
async def test_a_page_of_another_origin_writes_and_reads_nothing(origin):
    """What browsers send from such a page to a host that is not localhost: no Sec-Fetch-Site."""
    async with admin_side("gpu-gateway") as say:
        for kind in (*FORMS, JSON):
            answer = await say("POST /replicas HTTP/1.1", HOST, f"Origin: {origin}", kind, body=ADD)
            assert code(answer) == (403, "cross_site")
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


@pytest.mark.parametrize("kind", ["", "Content-Type:", *FORMS])
async def test_what_a_form_can_send_is_no_write(kind):
    """A page can leave the Content-Type out, with a Blob of no type."""
    async with admin_side("gpu-gateway") as say:
        answer = await say("POST /replicas HTTP/1.1", HOST, *filter(None, [kind]), body=ADD)
        assert code(answer) == (415, "unsupported_media_type")
        if kind in FORMS:
            assert (await say("POST /replicas/a:1/drain HTTP/1.1", HOST, kind))[0] == 415
        assert "attacker.example:1" not in say.fleet.replicas


FOREIGN = (
    "evil.example evil.example:8081 localhost.evil.example 127.0.0.1.evil.example gpu-gateway.evil.example 1.2.3.4.5"
)
OWN = "127.0.0.1:8081 10.1.2.3 [::1]:8081 [fd00::7] localhost:8081 LOCALHOST gpu-gateway GPU-gateway.:8081 admin.example:443"


@pytest.mark.parametrize("host", FOREIGN.split())
async def test_a_name_bound_to_our_address_by_somebody_else_reads_and_writes_nothing(host):
    async with admin_side("gpu-gateway") as say:
        for line in ("GET /replicas HTTP/1.1", "GET /metrics HTTP/1.1", "POST /replicas HTTP/1.1"):
            body = ADD if "POST" in line else b""
            answer = await say(line, f"Host: {host}", f"Origin: http://{host}", JSON, body=body)
            assert code(answer) == (403, "host_not_allowed") and b"--admin-allow-host" in answer[2]


async def test_addresses_and_this_machines_names_need_no_permission():
    async with admin_side("gpu-gateway", "Admin.Example.") as say:
        for host in OWN.split():
            assert (await say("GET /replicas HTTP/1.1", f"Host: {host}"))[0] == 200, host
        assert (await say("GET /livez HTTP/1.0"))[0] == 200, "HAProxy's check names no host"
        for host in ("a b", "x@localhost", "localhost:8081/", "[::1", ""):
            assert code(await say("GET /replicas HTTP/1.1", f"Host: {host}"))[0] == 400, host
        assert code(await say("GET /replicas HTTP/1.1", "Host: localhost", "Host: evil.example"))[0] == 400


async def test_with_a_token_nobody_gets_further_without():
    async with admin_side(token=TOKEN) as say:
        basic = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        wrongs = ["Bearer nonsense", f"Bearer {TOKEN}x", TOKEN, "Basic !!", f"Digest {TOKEN}", "Bearer", "Bearer \xff"]
        for line in ("GET /", "GET /status", "GET /metrics", "POST /replicas", "GET /nothing", "GET /livez/"):
            for wrong in ([], *([f"Authorization: {one}"] for one in wrongs)):
                answer = await say(f"{line} HTTP/1.1", "Host: localhost", *wrong)
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
