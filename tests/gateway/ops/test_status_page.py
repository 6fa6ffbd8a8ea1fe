"""What the live page shows in a real browser, under load and where something is amiss."""

import asyncio
import contextlib
import re
import time

import httpx
import pytest

from gateway.ops.guard import Guard
from replicas.lifecycle import State

from ..running import running
from .browser import CHROMIUM, MISSING, browser
from .examined import redis_trouble
from .stand_in import Gateway, count, served
from .test_guard import TOKEN

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=MISSING)
TEXT = "document.querySelector('main').innerText"
SYSTEM = "You answer for the billing desk, briefly and with the sum in the first line. " * 12


@contextlib.asynccontextmanager
async def shown(gateway, guard=None, user="", width=1360):
    """A browser's page with the gateway's live page. `user`: what stands before the host in its address."""
    async with served(gateway, guard) as port, browser() as page:
        await page.open(f"http://{user}localhost:{port}/", width)
        yield page


async def test_it_says_what_is_amiss_with_the_gateway_also_when_opened_with_the_token_in_its_address():
    gateway = Gateway()
    gateway.fleet.add("http://a:1")
    status = gateway.status()
    status["map"]["redis"] = {"trouble": redis_trouble("READONLY"), "ledger_joined": False, "ledger_reason": "NOPERM"}
    status["replicas"][0] |= {"map_role": "standalone", "map_role_reason": "no gateway leads"}
    status["policy_failures"] = {"./mine.py:Mine": {"failures": 1, "last": "KeyError: 8", "seconds_ago": 3.0}}
    status["background_failures"] = {"publish": {"failures": 3, "last": "KeyError: 7", "seconds_ago": 2.0}}
    status["api_keys"] = {
        "problem": "keys.yaml:2: sha256: is missing",
        "limits": {"joined": False, "reason": "READONLY", "gateways": 2},
    }
    status["tls"], status["discovery"] = {"problem": "key.pem is no PEM file"}, {"problem": "403 Forbidden"}
    gateway.status = lambda: status
    async with shown(gateway, Guard((), TOKEN), f"any:{TOKEN}@") as page:
        told = await page.until(
            "document.querySelector('#problems li') && document.getElementById('problems').innerText"
        )
    for said in (
        f"map shared through Redis {redis_trouble('READONLY')}",
        "load shared through Redis this gateway counts alone: NOPERM",
        "a:1 its part of the map is not shared: no gateway leads",
        "policy ./mine.py:Mine failed 1 time, 3 s ago: KeyError: 8",
        "background work publish failed 3 times, 2 s ago with KeyError: 7",
        "API keys the file cannot be used, and the keys read before stay good: keys.yaml:2: sha256: is missing",
        "limits shared through Redis this gateway counts alone: READONLY",
        "TLS the files cannot be used, and the certificate read before stays in use: key.pem is no PEM file",
        "discovery pods are as they were told last: 403 Forbidden",
    ):
        assert said in told
    assert page.problems == []


async def test_of_a_class_all_are_counted_that_were_sent_in_any_way_and_what_failed_has_kept_no_limits():
    gateway = Gateway()
    decisions = ("admitted", "degraded", "spilled", "queued", "refused", "left")
    count(gateway.metrics, admission={(decision, "free", "full"): 2 for decision in decisions})
    ended = {"met": 2, "missed": 1, "failed": 1}
    count(gateway.metrics, slo_requests={("free", "m", outcome): number for outcome, number in ended.items()})
    async with shown(gateway) as page:
        told = await page.until(
            "document.querySelector('#admissions tbody tr') && "
            "[...document.querySelectorAll('#admissions tbody td')].map(cell => cell.textContent)"
        )
    assert (told[1], told[5]) == ("6", "50.0 %")


async def test_a_replica_without_a_request_in_the_window_has_none_of_them_and_no_page_shows_what_is_no_number():
    gateway = Gateway()
    for number in range(2):
        gateway.fleet.add(f"http://a:{number + 1}", State.READY)
    gateway.metrics.replica_requests.inc("a:1", "2xx", by=3)
    gateway.recent.figures.look(time.time(), 0, 0, 0)
    async with shown(gateway) as page:
        told = await page.until(
            "document.querySelector('#replicas tbody tr') && "
            "[...document.querySelectorAll('#replicas tbody tr')].map(row => row.children[1].textContent)"
        )
        assert told == ["3 100 %", "0 0 %"]
        assert not re.search(r"NaN|undefined|Infinity|\bnull\b", await page.ask(TEXT))
    assert page.problems == []


def slow(gateway):
    gateway.fleet.add("http://b:1", State.READY, {"m": None})
    seconds = {"a:1": 2.0, "b:1": 16.0}
    count(gateway.metrics, replica_decode_tokens={"a:1": 200, "b:1": 200}, replica_decode_seconds=seconds)


def down(model):
    """A scene: there is another replica, of this model, which is down."""

    def begin(gateway):
        gateway.fleet.add("http://b:1", State.FAILED, {model: None}).reason = "it is so"

    return begin


def counted(**numbers):
    """A scene: this was counted."""
    return lambda gateway: count(gateway.metrics, **numbers)


OK, REFUSED = ("chat", "2xx"), ("chat", "4xx")


@pytest.mark.parametrize(
    "amiss,kind,word,first",
    [
        (down("m"), "bad", "down", "down 1 of 2 replicas is down: b:1 (it is so)"),
        (down("away"), "bad", "not served", "not served away: no replica takes requests for it"),
        (slow, "warn", "slow", "slow b:1 takes 8 x as long per token as the others for "),
        (counted(requests={OK: 18, ("chat", "cut"): 2}),
         "bad", "errors", "errors 2 of 20 requests of the last minute failed (10.0 %)"),
        (counted(requests={REFUSED: 12}, rejections={"engines_full": 12}),
         "bad", "full", "full 12 of 12 requests of the last minute got 429, as every engine that was asked"),
        (counted(requests={REFUSED: 3}, rejections={"engines_unauthorized": 3}),
         "bad", "engines' key", "engines' key 3 of 3 requests of the last minute got 401 or 403"),
        (counted(requests={OK: 99, REFUSED: 1}, rejections={"401": 1}),
         "warn", "clients' keys", "clients' keys 1 of 100 requests of the last minute got 401, as"),
        (counted(tenant_refusals={("acme", "requests"): 7}),
         "warn", "limits", "limits tenant acme is refused by its limit of requests per minute: 7 requests"),
        (counted(), "good", "ready", None),
    ],
)  # fmt: skip
async def test_its_chip_says_the_worst_that_clients_feel_and_that_comes_first_under_worth_a_look(
    amiss, kind, word, first
):
    gateway = Gateway()
    gateway.fleet.add("http://a:1", State.READY, {"m": None})
    amiss(gateway)
    gateway.recent.look(time.time())
    async with shown(gateway) as page:
        chip = await page.until(
            "document.getElementById('facts')?.children.length && [document.getElementById('ready').className, document.getElementById('ready').innerText]"
        )
        assert chip == [f"pill {kind}", word]
        if first is not None:
            assert (await page.ask("document.querySelector('#problems li').innerText")).startswith(first)
        if word == "not served":
            assert "models away, m" in await page.ask("document.getElementById('facts').innerText")
    assert page.problems == []


async def test_figures_are_of_the_last_minute_until_the_reader_asks_for_15():
    gateway = Gateway()
    gateway.metrics.requests.inc("chat", "2xx", by=5)
    gateway.recent.figures.look(now := time.time(), 0, 0, 0)
    gateway.metrics.requests.inc("chat", "2xx", by=2)
    gateway.recent.figures.look(now + 120, 0, 0, 0)
    tile = "[...document.querySelectorAll('.tile')].find(one => one.innerText.includes('Requests'))?.innerText"
    async with shown(gateway) as page:
        assert "2 in all" in await page.until(tile)
        await page.ask(
            "(() => { const one = document.getElementById('window'); one.value = 'whole'; one.dispatchEvent(new Event('change')) })()"
        )
        assert "7 in all" in await page.ask(tile)


async def test_the_queue_tile_counts_who_waits_now_and_names_the_peak_of_before():
    gateway = Gateway()
    gateway.fleet.add("http://a:1")
    for name in ("free", "premium"):
        gateway.metrics.admission.inc("queued", name, "full", by=5)
    gateway.recent.figures.look(time.time(), 0, 9, 0)
    gateway.view.waiting = lambda: {"free": 2, "premium": 1}
    tile = "[...document.querySelectorAll('.tile')].find(one => one.innerText.includes('Queue'))?.innerText"
    async with shown(gateway) as page:
        told = await page.until(tile)
        assert re.search(r"\b3\s*waiting now", told) and "peak 9" in told and "3 here, 0 in engines" in told, told
        assert "\n3 here, 0 in engines\n" in told, "text and legend are read as one sentence"
        gateway.view.waiting = dict
        await page.ask("new Promise(done => { clearTimeout(timer); poll().then(done) })")
        told = await page.ask(tile)
        assert re.search(r"\b0\s*waiting now", told) and "peak 9" in told, told


HOSTILE = "<img src=x onerror=document.title=1><script>document.title=2</script>"


def full_of(text):
    """A gateway with something to show in every section, with this text wherever a text is shown."""
    gateway = Gateway()
    for number in range(2):
        replica = gateway.fleet.add(f"http://a:{number + 1}", State.READY, {text: None, "b": text})
        replica.reason, replica.problems = text, (text,)
    replica.state = State.FAILED
    recent = gateway.recent
    recent.texts = True
    recent.journal.note(1.0, "state", text, text)
    recent.journal.failed(1.0, "a:1", text)
    decision = {"number": 1, "at": 1.0, "tokens": 9, "held_tokens": 0} | dict.fromkeys(("model", "path", "text"), text)
    recent.sampler.decisions.append({**decision, "replicas": ["a:1"], "sentence": f"a:1, because {text}"})
    node = {"path": [], "tokens": 16, "samples": 2, "share": 1.0, "holders": ["a:1", text], "more_holders": 0}
    recent._prefixes = lambda: {"samples": 2, "nodes": [{**node, "id": text, "model": text, "text": text}]}

    async def explain(path, body, headers):
        load = {"requests": 0}
        one = {"id": text, "uncached_tokens": 9, "seconds": 1.0, "ttft_seconds": 1.0, "chosen": True, "load": load}
        return {"sentence": f"{text}, because {text}", "choice": text, "mode": "exact", "note": text,
                "tokens": 9, "replicas": [one]}  # fmt: skip

    gateway.explain = explain
    return gateway


async def test_text_of_other_machines_and_clients_never_becomes_html():
    gateway = full_of(HOSTILE)
    async with shown(gateway) as page:
        await page.until("document.querySelector('#decisions li')")
        await page.ask("document.getElementById('ask-text').focus()")
        await page.type(HOSTILE)
        await page.press("Enter", modifiers=2)
        await page.until("document.querySelector('#ask-answer .said')")
        for part in ("facts", "problems", "replicas", "decisions", "prefixes", "log", "ask-answer"):
            assert HOSTILE in await page.ask(f"document.getElementById('{part}').textContent"), part
        assert await page.ask("document.querySelectorAll('main img, main script, main [onerror]').length") == 0
        assert (await page.ask("document.title")).endswith("Hitherto") and page.problems == []


async def ask(client, number):
    """One conversation of two turns that begins as the others do."""
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Invoice {number}?"}]
    for _ in range(2):
        streams = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": "sim", "messages": talk, "max_tokens": 6, **streams}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        talk += [{"role": "assistant", "content": "It is paid."}, {"role": "user", "content": "And before?"}]


@contextlib.asynccontextmanager
async def load(url):
    """Some conversations at a time, until it is left."""

    async def talk(first):
        number = first
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            while True:
                await ask(client, number)
                number += 10

    tasks = [asyncio.create_task(talk(first)) for first in range(4)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def test_under_load_it_shows_figures_reasons_prefixes_and_a_log_and_answers_what_if():
    async with running("--launch", "2", "--profile", "sim") as gateway, browser() as page:
        await gateway.ready(2)
        await page.open(str(gateway.admin.base_url) + "/")
        async with load(gateway.url):
            await page.until("document.querySelectorAll('#decisions li').length >= 3", 60)
            await page.until("document.querySelector('#prefixes .node')")
            tiles = await page.ask("[...document.querySelectorAll('.tile')].map(tile => tile.innerText)")
            names = ["TTFT", "Whole answer", "Cache hit rate", "Requests", "Errors", "Queue"]
            assert [tile.split("\n")[0] for tile in tiles] == names
            assert all("last " in tile.split("\n")[1] for tile in tiles), "each tile names its window"
            assert "ms" in tiles[0] and "predicted" in tiles[2] and "waiting" in tiles[5]
            replicas = [one["id"] for one in (await gateway.status())["replicas"]]
            decision = await page.ask("document.querySelector('#decisions li').innerText")
            assert any(f"{id}, " in decision for id in replicas) and "the request costs" in decision
            assert "held by" in await page.ask("document.getElementById('prefixes').innerText")
            told = await page.ask(TEXT)
            assert "Invoice" not in told and "billing desk" not in told, "nothing of prompts"
            log = await page.ask("document.getElementById('log').innerText")
            assert "warming → ready" in log and "joined the fleet" in log and "KV events live" in log
        await gateway.until(lambda status: status["totals"]["inflight"] == 0)
        before = (await gateway.status())["totals"]
        for _ in range(2):  # the second time nobody holds what was asked about the first time
            await page.ask("document.getElementById('ask-answer').replaceChildren()")
            await page.ask(
                "document.getElementById('ask-text').value = ''; document.getElementById('ask-text').focus()"
            )
            await page.type("What nobody has asked before. " * 20)
            await page.press("Tab")
            await page.press("Enter")
            said = await page.until("document.querySelector('#ask-answer .said')?.innerText")
            assert any(said.startswith(id) for id in replicas) and "the request costs" in said
            held = "[...document.querySelectorAll('#ask-answer td[data-name=Holds]')].map(cell => cell.innerText)"
            assert await page.ask(held) == ["0 tokens", "0 tokens"]
        assert (await gateway.status())["totals"] == before, "it leaves no trace"
        assert await gateway.counted("hitherto_reservations") == 0
        await gateway.admin.post(f"/replicas/{replicas[0]}/drain", json={})
        await page.until("document.getElementById('log').innerText.includes('draining')")
        assert page.problems == []


async def test_a_replica_that_was_drained_and_not_asked_back_is_worth_a_look():
    gateway = Gateway()
    replica = gateway.fleet.add("http://a:1", State.STOPPED)
    replica.reason, replica.since = "drained on request", time.monotonic()
    async with shown(gateway) as page:
        told = await page.until("document.querySelector('#trouble:not([hidden])')?.innerText")
        assert "a:1" in told and "hitherto replicas add http://a:1" in told
        row = await page.ask("document.querySelector('#replicas tbody').innerText")
        assert re.search(r"stopped for \d+ s: drained on request", row), row


async def test_with_several_models_each_replica_says_which_it_serves():
    gateway = Gateway()
    for id, names in (("a:1", {"chat-model": None, "my-lora": "chat-model"}), ("b:1", {"sql-model": None})):
        replica = gateway.fleet.add(f"http://{id}", State.READY, names)
    replica.models, replica.state = {}, State.FAILED  # what an engine told goes with it
    gateway.view.served_by = lambda id: frozenset(["sql-model"] if id == "b:1" else [])
    async with shown(gateway) as page:
        await page.until("document.querySelectorAll('#replicas tbody tr').length == 2")
        rows = await page.ask(
            "[...document.querySelectorAll('#replicas tbody tr')].map(row => row.innerText).join('|')"
        )
        first, second = rows.split("|")
        assert "chat-model" in first and "sql-model" not in first and "my-lora" not in first
        assert "sql-model" in second


@pytest.mark.parametrize("width", [360, 760, 1360])
async def test_nothing_is_wider_than_the_window_and_the_keyboard_reaches_all(width):
    gateway = Gateway()
    for number in range(30):
        url = f"http://replica-{number:02}.inference.svc.cluster.local:8000"
        replica = gateway.fleet.add(url, State.READY, {"an-organisation/a-model-with-a-long-name-of-70B": None})
    replica.state, replica.reason = State.FAILED, "nobody listens there: " + "x" * 200
    async with shown(gateway, width=width) as page:
        await page.until("document.querySelectorAll('#replicas tbody tr').length == 30")
        assert await page.ask("document.documentElement.scrollWidth") <= width
        first = await page.ask("document.querySelector('#replicas tbody tr').innerText")
        assert "nobody listens there" in first, "what is amiss stands first"
        reached = set()
        for _ in range(14):
            await page.press("Tab")
            reached.add(await page.ask("document.activeElement.id || document.activeElement.innerText"))
        expected = {"Skip to the replicas", "decisions", "prefixes", "ask-text", "Ask", "log", "pause", "metrics"}
        assert expected <= reached
        unnamed = "[...document.querySelectorAll('button, a, textarea, select, [role=region]')].filter(one => " \
                  "!(one.innerText || one.getAttribute('aria-labelledby') || one.labels?.length)).length"  # fmt: skip
        assert await page.ask(unnamed) == 0


async def test_a_page_that_is_paused_stays_as_it_is():
    gateway = Gateway()
    gateway.fleet.add("http://a:1")
    async with shown(gateway) as page:
        await page.until("document.querySelector('#replicas tbody tr')")
        await page.ask("document.getElementById('pause').focus()")
        await page.press(" ")
        await page.until("document.getElementById('age').textContent == 'paused'")
        gateway.fleet.add("http://b:1")
        await page.ask("new Promise(done => { clearTimeout(timer); poll().then(done) })")
        assert await page.ask("document.querySelectorAll('#replicas tbody tr').length") == 1
        await page.press(" ")
        await page.until("document.querySelectorAll('#replicas tbody tr').length == 2")


async def test_a_gateway_that_is_gone_is_said_and_the_last_figures_stay():
    gateway = Gateway()
    gateway.fleet.add("http://a:1")
    async with browser() as page:
        async with served(gateway) as port:
            await page.open(f"http://localhost:{port}/")
            await page.until("document.querySelector('#replicas tbody tr')")
        await page.until("document.getElementById('notice').innerText.includes('has not answered')")
        assert await page.ask("document.getElementById('ready').innerText") == "no answer"
        assert await page.ask("document.querySelectorAll('#replicas tbody tr').length") == 1
