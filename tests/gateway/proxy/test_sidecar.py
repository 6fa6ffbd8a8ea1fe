"""Requests that go once, to a sidecar that has the prompt computed elsewhere: what it is told, and its faults."""

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gateway.proxy.disagg import legs
from replicas import State

from ..http.talk import eventually, read_request
from .replies import ANSWER, EVENT, LONG, SSE_HEAD, answers, chunk, post, reply, says, silent
from .stack import stack
from .test_legs import asks, crowd, give_roles, hangs_within_its_stream

HEADER = b"x-prefiller-host-port"
STREAM = [chunk(EVENT), chunk(EVENT)]


@asynccontextmanager
async def fleet(*scripts, roles=("prefill", "decode"), **options):
    """A stack of replicas with these roles, the decoders behind sidecars; the prefillers are asked nothing here."""
    async with stack(*scripts, **options) as s:
        for backend in s.proxy.backends.values():
            backend.replica.moves_by = "llm-d"
            backend.follow_incarnation()
        give_roles(s, *roles)
        yield s


def named(head):
    """The prefiller that a request's head names."""
    found = [line.partition(b": ")[2].decode() for line in head.split(b"\r\n") if line.lower().startswith(HEADER)]
    assert len(found) <= 1
    return found[0] if found else None


async def untouched(reader, writer):
    raise AssertionError("the gateway sends a prefiller nothing")


def unless_named(script):
    """A sidecar that follows the script where it is to have a prompt computed elsewhere, and else answers."""
    heads = []

    async def either(reader, writer):
        while True:
            head, body = await read_request(reader)
            heads.append(named(head))
            if named(head) is None:
                writer.write(reply(ANSWER))
                continue
            again = asyncio.StreamReader()
            again.feed_data(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            again.feed_eof()
            await script(again if script is not silent else reader, writer)
            return

    return either, heads


async def test_the_request_goes_once_and_names_the_prefiller():
    seen = []
    async with fleet(untouched, answers(seen=seen), cached_tokens_header=True) as s:
        prefiller, decoder = s.proxy.backends.values()
        status, headers, body = await asks(s, extra=b"X-Prefiller-Host-Port: 10.9.9.9:1\r\n")
        assert (status, body, headers["x-hitherto-replica"]) == (200, ANSWER, decoder.id)
        [(head, sent)] = seen
        assert named(head) == prefiller.id and sent == LONG, "what the client wrote there is not passed on"
        await eventually(s.idle)
        assert s.metrics.legs.values == {("prefill", "complete"): 1, ("decode", "complete"): 1}
        (hashes,) = {tuple(s.proxy.models.routes.prepare("/v1/chat/completions", LONG, None, ()).hashes)}
        held = s.proxy.router.map.match(list(hashes), 0.0).held
        assert held[prefiller.slot] == held[decoder.slot] == len(hashes) > 1
        assert not s.metrics.predictions.total(), "nobody tells what the prefiller had cached"


async def test_a_client_does_not_choose_the_prefiller_of_a_whole_request():
    seen = []
    async with fleet(untouched, answers(seen=seen)) as s:
        short = LONG.replace(b"hi " * 100, b"hi")
        assert (await asks(s, short, extra=b"X-Prefiller-Host-Port: 10.9.9.9:1\r\n"))[0] == 200
        assert named(seen[0][0]) is None


async def test_the_prefiller_is_loaded_until_the_answer_begins():
    goes_on = asyncio.Event()

    async def slow(reader, writer):
        await read_request(reader)
        await goes_on.wait()
        writer.write(SSE_HEAD + STREAM[0])
        await reader.read()

    async with fleet(untouched, slow) as s:
        prefiller, decoder = s.proxy.backends
        load = s.proxy.router.ledger.load
        talk = await s.say(post(LONG.replace(b"{", b'{"stream": true, ', 1)))
        await s.exchange()
        assert load(prefiller).prefill_tokens > 50 and load(prefiller).requests == load(decoder).requests == 1
        goes_on.set()
        await talk.until(b"data:")
        await eventually(lambda: load(prefiller).requests == 0)
        assert load(decoder).decoding == 1
        assert s.metrics.transfer_seconds.count(decoder) == 1
        await talk.close()


async def test_an_answer_in_one_piece_keeps_the_prefiller_loaded_for_as_long_as_it_should_take():
    async with fleet(untouched, silent) as s:
        prefiller, decoder = s.proxy.backends
        talk = await s.say(post(LONG))
        await eventually(lambda: s.metrics.legs.total(leg="prefill", outcome="complete") == 1)
        load = s.proxy.router.ledger.load
        assert (load(prefiller).requests, load(decoder).requests) == (0, 1)
        await talk.close()


def prepared_twice(prepare):
    """Prompts in two variants, the second in blocks twice as large and a space of its own, each with its ids."""

    def prepare_both(*given):
        prompt = prepare(*given)
        prompt.kind, prompt.token_ids = "chat", bytes(4 * prompt.tokens)
        prompt.also = replace(prompt, block_size=32, hashes=prompt.hashes[1::2], space=prompt.space + 1)
        return prompt

    return prepare_both


@pytest.mark.parametrize("variant", [0, 1])
async def test_the_leg_that_is_sent_has_the_prompt_as_its_own_variant_has_it(variant, monkeypatch):
    """With the other one for a retry, and without ids, for which its body would be kept until the answer's end."""
    async with fleet(untouched, silent, untouched, silent, roles=("prefill", "decode") * 2) as s:
        pairs = [*s.proxy.backends.values()]
        space = s.proxy.models.spaces[0].number
        for one in pairs[2:]:
            one.candidate.space = space + 1
        for one in pairs[2 - 2 * variant : 4 - 2 * variant]:  # those of the other variant
            one.replica.state = State.FAILED
        s.proxy.changed()
        monkeypatch.setattr(s.proxy.models.routes, "prepare", prepared_twice(s.proxy.models.routes.prepare))
        talk = await s.say(post(LONG))
        await s.exchange()
        [exchange] = s.proxy.exchanges
        [attempt] = exchange.attempts
        assert attempt.backend is pairs[2 * variant + 1]
        own = attempt.prompt
        assert own is exchange.prompt and attempt.placement.demand.space == own.space == space + variant
        assert attempt.placement.demand.hashes is own.hashes and own.block_size == (16, 32)[variant]
        assert own.also is not None and (own.also.space, own.also.also) == (space + 1 - variant, None)
        assert own.token_ids == b""
        await talk.close()


FAULTS = {
    "502": (answers(b"", b"502 Bad Gateway"), "prefill failed"),
    "500": (answers(b"{}", b"500 Internal Server Error"), "prefill failed"),
    "503": (answers(b"{}", b"503 Service Unavailable"), "prefill failed"),
    "429": (answers(b"{}", b"429 Too Many Requests"), "prefill failed"),
    "not on its list": (says(b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nno"), "prefill failed"),
    "400": (answers(b'{"error":{"message":"no","type":"BadRequestError","code":400}}', b"400 Bad Request"), "leg refused"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_prefiller_that_fails_costs_the_client_nothing_where_the_decoder_is_well(fault, stream):
    script, reason = FAULTS[fault]
    sidecar, heads = unless_named(script)
    async with fleet(untouched, sidecar) as s:
        prefiller, decoder = s.proxy.backends
        body = LONG.replace(b"{", b'{"stream": true, ', 1) if stream else LONG
        assert (await asks(s, body))[0::2] == (200, ANSWER)
        assert heads == [prefiller, None], "the same decoder computes it itself"
        await eventually(s.idle)
        assert s.metrics.retries.values == {(reason,): 1} and not s.faults and not s.unconfirmed
        assert s.proxy.router.transfers.paused(prefiller, decoder, 0.0) is (reason == "prefill failed")


async def test_a_decoder_that_waits_for_a_prefiller_that_is_gone_is_not_waited_for():
    sidecar, heads = unless_named(silent)
    async with fleet(untouched, sidecar, request_timeout=60.0) as s:
        prefiller, _ = s.proxy.backends.values()
        talk = await s.say(post(LONG.replace(b"{", b'{"stream": true, ', 1)))
        await eventually(lambda: heads)
        s.becomes(prefiller.replica, State.FAILED)
        assert (await talk.response())[0] == 200 and heads == [prefiller.id, None]


async def test_a_transfer_that_stalls_is_given_up(monkeypatch):
    monkeypatch.setattr(legs, "STALLS_SECONDS", 0.3)
    monkeypatch.setattr(legs, "STALLS_TIMES", 1.0)
    seen = []
    async with fleet(
        untouched, silent, answers(seen=seen), roles=("prefill", "decode", "decode"), request_timeout=60.0
    ) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert s.metrics.retries.values == {("transfer stalled",): 1} and named(seen[0][0]) is None


MOMENTS = {
    "nothing is there": (silent, lambda s: any(x.attempts and x.attempts[-1].sent_at for x in s.proxy.exchanges)),
    "the answer has begun": (
        hangs_within_its_stream,
        lambda s: any(x.attempts and x.attempts[-1].pieces for x in s.proxy.exchanges),
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves(moment):
    script, reached = MOMENTS[moment]
    async with fleet(untouched, script) as s:
        talk = await s.say(post(LONG.replace(b"{", b'{"stream": true, ', 1)))
        await eventually(lambda: reached(s))
        assert not s.idle()
        await talk.close()
        await eventually(s.idle)
        assert s.metrics.client_aborts.total() == 1 and s.metrics.legs.total(outcome="abandoned") == 1


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_nothing_stays_reserved(seed):
    dice = random.Random(seed)

    async def whatever(reader, writer):
        while True:
            await read_request(reader)
            await asyncio.sleep(dice.choice((0, 0, 0.002, 0.01)))
            luck = dice.random()
            if luck < 0.1:
                return
            if luck < 0.3:
                writer.write(
                    reply(b"{}", dice.choice((b"502 Bad Gateway", b"503 Busy", b"400 Bad Request", b"403 No")))
                )
                continue
            writer.write(SSE_HEAD + chunk(EVENT))
            await writer.drain()
            if luck < 0.4:
                return
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with fleet(untouched, untouched, whatever, whatever, roles=("prefill", "prefill", "decode", "decode")) as s:
        s.proxy.router.transfers.failed = lambda *pair: None  # else the first failure would end all legs
        await crowd(s, dice)
        assert s.metrics.legs.total(leg="decode", outcome="complete") > 0
