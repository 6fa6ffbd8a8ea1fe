"""Requests that go once, to a sidecar that has the prompt computed elsewhere: what it is told, and its faults."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

from replicas import State

from ..http.talk import eventually
from .legs import BEGUN, REFUSED, SIDECAR, STREAMED, Side, answers, asks, disaggregated, named, says, untouched, waits
from .replies import ANSWER, LONG, post, reply

fleet = partial(disaggregated, way=SIDECAR)


@pytest.mark.parametrize("body", [LONG, LONG.replace(b"hi " * 100, b"hi")], ids=["in two legs", "whole"])
async def test_the_request_names_the_prefiller_that_was_chosen_here_whatever_its_client_writes(body):
    d = Side(answers)
    async with fleet(untouched, d) as s:
        prefiller, _ = s.proxy.backends
        assert (await asks(s, body, extra=b"X-Prefiller-Host-Port: 10.9.9.9:1\r\n"))[0::2] == (200, ANSWER)
        assert named(d.heads[0]) == (prefiller if body is LONG else None) and d.bodies == [json.loads(body)]


async def test_the_prefiller_is_loaded_until_the_answer_begins():
    goes_on = asyncio.Event()
    async with fleet(untouched, Side(says(goes_on, BEGUN, then="wait"))) as s:
        prefiller, decoder = s.proxy.backends
        load = s.proxy.router.ledger.load
        talk = await s.say(post(STREAMED))
        await s.exchange()
        assert load(prefiller).prefill_tokens > 50 and load(prefiller).requests == load(decoder).requests == 1
        goes_on.set()
        await talk.until(b"data:")
        await eventually(lambda: load(prefiller).requests == 0)
        assert load(decoder).decoding == 1 and s.metrics.transfer_seconds.count(decoder) == 1
        await talk.close()


async def test_an_answer_in_one_piece_keeps_the_prefiller_loaded_for_as_long_as_it_should_take():
    async with fleet(untouched, Side(waits)) as s:
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
    async with fleet(untouched, Side(waits), untouched, Side(waits), roles=("prefill", "decode") * 2) as s:
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
    "502": (reply(b"", b"502 Bad Gateway"), "prefill failed"),
    "500": (reply(b"{}", b"500 Internal Server Error"), "prefill failed"),
    "503": (reply(b"{}", b"503 Service Unavailable"), "prefill failed"),
    "429": (reply(b"{}", b"429 Too Many Requests"), "prefill failed"),
    "not on its list": (reply(b"no", b"403 Forbidden").replace(b"application/json", b"text/plain"), "prefill failed"),
    "400": (reply(REFUSED, b"400 Bad Request"), "leg refused"),
}


@pytest.mark.parametrize("body", [LONG, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_prefiller_that_fails_costs_the_client_nothing_where_the_decoder_is_well(fault, body):
    said, reason = FAULTS[fault]
    d = Side(says(said), answers)
    async with fleet(untouched, d) as s:
        prefiller, decoder = s.proxy.backends
        assert (await asks(s, body))[0::2] == (200, ANSWER)
        assert [*map(named, d.heads)] == [prefiller, None], "the same decoder computes it itself"
        await eventually(s.idle)
        assert s.metrics.retries.values == {(reason,): 1} and not s.faults and not s.unconfirmed
        assert s.proxy.router.transfers.paused(prefiller, decoder, 0.0) is (reason == "prefill failed")
