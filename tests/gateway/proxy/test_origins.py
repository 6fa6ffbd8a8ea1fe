"""What browsers need before a page of another site may use the gateway."""

import json

import pytest

from gateway import datapath
from gateway.http.messages import Limits
from gateway.settings import ConfigError, load
from gateway.tenants.keys import Keys

from ..tenants.test_keys import bearer, entry
from .replies import answers, post, says
from .stack import stack

PAGE, OTHER = b"https://app.example", b"https://other.example"
ORIGIN = b"Origin: %b\r\n" % PAGE


def preflight(path: bytes, origin: bytes = PAGE, method: bytes = b"POST") -> bytes:
    return (
        b"OPTIONS %b HTTP/1.1\r\nHost: h\r\nOrigin: %b\r\nAccess-Control-Request-Method: %b\r\n"
        b"Access-Control-Request-Headers: authorization,x-stainless-lang\r\n\r\n" % (path, origin, method)
    )


def get(path: bytes, extra: bytes = ORIGIN) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: h\r\n%b\r\n" % (path, extra)


async def ask(s, raw: bytes, allowed: str = PAGE.decode()):
    s.server.clients.origins = datapath.origins(load({"allow_origin": allowed}, {}).settings)
    return await s.ask(raw)


@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/models/org/a", b"/health", b"/v1/chat/completions", b"/v1/rerank", b"/none"])  # fmt: skip
async def test_a_browser_may_ask_at_every_path_and_without_a_key(tmp_path, path):
    (tmp_path / "keys").write_text(entry("one"))
    async with stack(keys=Keys(tmp_path / "keys")) as s:
        status, headers, _ = await ask(s, preflight(path))
        assert status == 200 and headers["access-control-allow-origin"] == PAGE.decode()
        assert headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
        assert headers["vary"] == "Origin", "once: browsers refuse an answer that names its page twice"
        assert {"GET", "POST", "DELETE"} <= {*headers["access-control-allow-methods"].split(", ")}
        status, headers, _ = await ask(s, preflight(path, OTHER))
        assert status == 400 and "access-control-allow-origin" not in headers


async def test_without_the_setting_an_engine_says_what_browsers_ask_of_the_gateways_own_paths():
    async with stack(answers()) as s:
        for path in (b"/v1/models", b"/v1/models/m", b"/health", b"/v1/completions"):
            status, headers, _ = await s.ask(preflight(path))
            assert (status, "x-hitherto-replica" in headers) == (200, True)


@pytest.mark.parametrize(("allowed", "told"), [(PAGE.decode(), PAGE.decode()), ("*", "*"), (f"{OTHER.decode()}, null", None)])  # fmt: skip
async def test_every_answer_names_the_page_and_shows_it_the_headers(tmp_path, allowed, told):
    """The gateway's own, its errors, those of the wire, and engines', whose own words on pages are left out."""
    (tmp_path / "keys").write_text(entry("one", requests_per_minute=1))
    engine = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\naccess-control-allow-origin: *\r\ncontent-length: %d\r\n\r\n%b"
    body = b'{"object":"text_completion","choices":[{"text":"a"}]}'
    async with stack(
        says(engine % (len(body), body)), keys=Keys(tmp_path / "keys"), limits=Limits(body_bytes=1000)
    ) as s:
        key = bearer("one") + ORIGIN
        asked = {
            200: (get(b"/v1/models", key), get(b"/v1/models/m", key), get(b"/health"), post(extra=key)),
            401: (post(extra=ORIGIN),),
            404: (get(b"/v1/models/none", key), get(b"/sleep", key)),
            413: (post(b"x" * 2000, extra=key),),
            417: (post(extra=key + b"Expect: much\r\n"),),
        }
        for wanted, raws in asked.items():
            for raw in raws:
                status, headers, _ = await ask(s, raw, allowed)
                assert (status, headers.get("access-control-allow-origin")) == (wanted, told)
                assert (headers.get("vary") is None) == (told == "*")
                exposed = headers.get("access-control-expose-headers", "").split(", ")
                names = {"retry-after", "x-hitherto-replica", "x-request-id", "x-ratelimit-remaining-requests"}
                assert names.issubset(exposed) == (told is not None)


async def test_what_a_browser_asks_first_has_its_turn_among_pipelined_requests():
    async with stack(answers()) as s:
        s.server.clients.origins = datapath.origins(load({"allow_origin": "*"}, {}).settings)
        talk = await s.say((post(extra=ORIGIN) + preflight(b"/v1/models") + get(b"/v1/models")) * 20)
        for _ in range(20):
            told = [await talk.response() for _ in range(3)]
            assert [status for status, *_ in told] == [200] * 3
            assert ["access-control-allow-methods" in headers for _, headers, _ in told] == [False, True, False]
            assert {headers["access-control-allow-origin"] for _, headers, _ in told} == {"*"}


async def test_who_names_no_page_is_answered_as_before():
    async with stack(answers()) as s:
        status, headers, body = await ask(s, get(b"/v1/models", b""), "*")
        assert status == 200 and json.loads(body)["data"][0]["id"] == "m"
        assert not [name for name in headers if name.startswith("access-control-") or name == "vary"]


@pytest.mark.parametrize("wrong", ["https://app.example/", "app.example", '["*"]', "https://", "*.example"])
def test_an_origin_that_no_browser_writes_is_refused_at_the_start(wrong):
    with pytest.raises(ConfigError, match=r"HITHERTO_ALLOW_ORIGIN: .*is not an origin as browsers write it"):
        load({}, {"HITHERTO_ALLOW_ORIGIN": wrong})
