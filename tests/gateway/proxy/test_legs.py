"""Requests in two legs between real sockets: what each replica is sent, what the client gets, what follows faults. What
is alike in all ways of passing caches on is here; what two legs at once and sidecars have of their own is in
`test_legs_at_once.py` and `test_sidecar.py`."""

import asyncio
import json
from time import monotonic

import pytest

from gateway.proxy.disagg import legs
from policies import Demand, two_legs
from replicas import State
from replicas.lifecycle import Event

from ..http.talk import eventually, free_port
from .legs import (
    BEGUN,
    CHOICES,
    HANDED,
    KEEPS_NOTHING,
    MOONCAKE,
    NIXL,
    PARAMETERS,
    REFUSED,
    SIDECAR,
    STREAM,
    STREAMED,
    USED,
    WAYS,
    Side,
    answers,
    asks,
    begins,
    closes,
    disaggregated,
    give_roles,
    room_of,
    says,
    sent,
    streams,
    waits,
)
from .replies import ANSWER, BODY, ENDS, EVENT, LONG, SSE_HEAD, chunk, post, reply
from .stack import stack

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=[way.moves_by for way in WAYS])
TWO_REQUESTS = pytest.mark.parametrize("way", [NIXL, MOONCAKE], ids=["nixl", "mooncake"])
hands = NIXL.computes()


def hashes(s):
    """The blocks of LONG."""
    return list(s.proxy.models.routes.prepare("/v1/chat/completions", LONG, None, ()).hashes)


def held(s):
    """How many blocks of LONG each replica is taken to hold."""
    match = s.proxy.router.map.match(hashes(s), 0.0)
    return [match.held[backend.slot] for backend in s.proxy.backends.values()]


@STREAMS
@EACH_WAY
async def test_the_prompt_goes_to_the_prefiller_and_the_answer_comes_from_the_decoder(way, stream):
    p, d = way.prefiller(), Side(streams if stream else answers)
    async with disaggregated(p, d, way=way, cached_tokens_header=True) as s:
        prefiller, decoder = s.proxy.backends
        body = STREAMED if stream else LONG
        status, headers, got = await asks(s, body)
        assert (status, headers["x-hitherto-replica"]) == (200, decoder)
        assert got == (EVENT + EVENT + b"data: [DONE]\n\n" if stream else ANSWER)
        await eventually(s.idle)
        assert s.metrics.legs.values == {("prefill", "complete"): 1, ("decode", "complete"): 1}
        assert s.metrics.leg_choices.total(choice="apart") == 1
        assert s.metrics.transfer_seconds.count(decoder) == stream
        # what was cached is the prefiller's to tell; of a sidecar's nobody tells
        assert s.metrics.predictions.values == ({} if way is SIDECAR else {(prefiller, "equal"): 1})
        assert held(s)[0] == held(s)[1] > 1
        assert (await asks(s, body))[0] == 200 and d.legs == ["decode", "whole"]
        assert way is SIDECAR or p.legs == ["prefill"]


async def test_the_decoder_is_given_what_the_prefiller_answered_and_the_clients_request():
    p, d = Side(hands), Side(answers)
    async with disaggregated(p, d) as s:
        await asks(s, LONG.replace(b"{", b'{"stream_options": {}, "max_tokens": 40, ', 1))
        (asked,), (handed,) = p.bodies, d.bodies
        assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
        assert asked == json.loads(LONG) | {"max_tokens": 1, "stream": False}
        assert handed.pop("kv_transfer_params") == PARAMETERS
        assert handed == json.loads(LONG) | {"max_tokens": 40, "stream_options": {}}


async def test_a_first_legs_answer_in_chunks():
    body = b"".join(chunk(HANDED[at : at + 50]) for at in range(0, len(HANDED), 50)) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    d = Side(answers)
    async with disaggregated(Side(says(head + body)), d) as s:
        assert (await asks(s))[0] == 200 and d.bodies[0]["kv_transfer_params"] == PARAMETERS


# --- what is learned of transfers


def written(**usage):
    return json.dumps(CHOICES | {"usage": USED | usage}).encode()


TWO_TOKENS = reply(written(completion_tokens=2))


@pytest.mark.parametrize(
    ("answer", "seconds", "stands_still", "is_learned"),
    [
        (STREAM, 10.0, False, True),
        (TWO_TOKENS, 10.0, False, True),
        # What is left of seconds once its writing is taken away is the error of that prediction.
        (reply(written(completion_tokens=100_000)), 0.1, False, False),
        (STREAM, 10.0, True, False),
        (TWO_TOKENS, 10.0, True, False),
    ],
    ids=["streamed", "in one piece", "long, in one piece", "streamed, stood still", "in one piece, stood still"],
)
async def test_what_a_transfer_took_is_learned_unless_a_long_answer_or_a_prefiller_that_stood_still_hides_it(
    answer, seconds, stands_still, is_learned
):
    goes_on, d = asyncio.Event(), Side()
    d.acts = [says(goes_on, answer)]
    async with disaggregated(Side(hands), d) as s:
        prefiller, decoder = s.proxy.backends.values()
        transfers, now = s.proxy.router.transfers, monotonic()
        for _ in range(100):
            transfers.observe(prefiller.id, decoder.id, 96, seconds, now)
        before = transfers.seconds(prefiller.id, decoder.id, 96, now)
        assert before == pytest.approx(seconds, rel=0.1)
        talk = await s.say(post(STREAMED if answer is STREAM else LONG))
        await eventually(lambda: d.bodies)
        if stands_still:
            prefiller.replica.apply(Event.TROUBLE, "no answer to two probes", monotonic())
            prefiller.replica.apply(Event.SERVES, "answers probes again", monotonic())
        goes_on.set()
        assert (await talk.response())[0] == 200
        await eventually(s.idle)
        after = transfers.seconds(prefiller.id, decoder.id, 96, now)
        assert prefiller.replica.state is State.READY
        assert after < 0.9 * before if is_learned else after == before
        assert s.metrics.transfer_seconds.count(decoder.id) == (is_learned or stands_still)


async def test_what_the_decoder_says_was_cached_is_compared_with_nothing():
    """It came from elsewhere: predicted was what the prefiller holds."""
    fetched = written(prompt_tokens_details={"cached_tokens": 80})
    async with disaggregated(Side(hands), Side(says(reply(fetched)))) as s:
        prefiller, decoder = s.proxy.backends
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        assert {replica for replica, _ in s.metrics.predictions.values} == {prefiller}
        assert not s.metrics.reported_cached_tokens.total(replica=decoder)
        assert s.metrics.prompt_tokens.total(replica=prefiller) == s.metrics.prompt_tokens.total() > 0


# --- which requests have two legs


@pytest.mark.parametrize(
    "policy", ["round_robin", "random", "least_load", "power_of_two", "consistent_hash", "prefix_affinity"]
)
async def test_a_policy_without_seconds_keeps_to_the_roles(policy):
    """Prompts of more than a block are computed by those with role=prefill, and by nobody else; answers they write
    none."""
    p, d = Side(hands), Side(answers)
    async with disaggregated(p, p, d, d, roles=("prefill", "prefill", "decode", "decode"), policy=policy) as s:
        for number in range(6):
            assert (await asks(s, LONG.replace(b"hi ", b"%d " % number, 200)))[0] == (await asks(s, BODY))[0] == 200
        await eventually(s.idle)
        assert p.legs == ["prefill"] * 6 and sorted(d.legs) == ["decode"] * 6 + ["whole"] * 6


async def test_least_time_goes_apart_by_itself_where_a_prompt_would_hold_up_many_streams():
    """Long prompts among chats: those are computed elsewhere, the chats' own where they are answered."""
    p, d = Side(hands), Side(answers)
    async with disaggregated(p, d, policy="least_time") as s:
        router, [_, decoder] = s.proxy.router, [*s.proxy.backends.values()]
        long = LONG.replace(b"hi " * 100, b"hi there " * 20_000)
        assert (await asks(s, long))[0] == 200 and d.legs == ["whole"], "nobody is held up yet"
        streams_there = [
            two_legs.commit_decoder(router, Demand(4000), decoder.candidate, monotonic()) for _ in range(66)
        ]
        assert (await asks(s, long.replace(b"hi", b"ho")))[0] == 200
        assert (p.legs, d.legs) == (["prefill"], ["whole", "decode"])
        assert (await asks(s, LONG))[0] == 200
        assert p.legs == ["prefill"] and d.legs[2:] == ["whole"], "a chat's is soon computed"
        for one in streams_there:
            router.abandon(one, computed=False)


async def test_without_roles_nothing_has_two_legs():
    side = Side(answers)
    async with stack(side, side) as s:
        for _ in range(4):
            assert (await asks(s))[0] == 200
        assert side.legs == ["whole"] * 4 and not s.metrics.leg_choices.total()


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        LONG.replace(b"{", b'{"n": 2, ', 1),
        LONG.replace(b"{", b'{"kv_transfer_params": {"do_remote_decode": true}, ', 1),
    ],
    ids=["one block", "two choices", "a leg of another gateway's"],
)
async def test_what_can_have_no_legs_stays_whole(body):
    p, d = Side(hands), Side(answers)
    async with disaggregated(p, d) as s:
        assert (await asks(s, body))[0::2] == (200, ANSWER)
        assert not p.bodies and d.bodies == [json.loads(body)]


async def test_a_prefiller_gets_whole_requests_only_if_nobody_else_is_there():
    p = Side(answers)
    async with disaggregated(p, Side(answers)) as s:
        for _ in range(4):
            await asks(s, BODY)
        assert not p.bodies
        _, decoder = s.proxy.backends.values()
        s.becomes(decoder.replica, State.FAILED)
        for _ in range(3):
            assert (await asks(s))[0] == 200
        assert p.legs == ["whole"] * 3


async def test_a_role_without_a_counterpart_is_complained_of_once(caplog):
    async with disaggregated(Side(answers), Side(answers), roles=("prefill", "prefill")) as s:
        s.proxy.changed()
        assert caplog.text.count("none has role=decode") == 1 and "#role=decode" in caplog.text
        give_roles(s, "decode", "decode")
        assert caplog.text.count("none has role=prefill") == 1
        give_roles(s, "decode", "both")
        assert caplog.text.count("none has role") == 2


# --- faults of the first leg


def first_faults(computed):
    """What becomes of a first leg that is answered with `computed` where all is well, before another prefiller is
    asked."""
    return {
        "dies before its answer": closes,
        "dies within its head": says(b"HTTP/1.1 200 OK\r\nContent-", then="close"),
        "dies within its body": says(reply(computed)[:-9], then="close"),
        "says what is no HTTP": says(b"SSH-2.0-OpenSSH\r\n", then="close"),
        "500": says(reply(b"{}", b"500 Internal Server Error")),
        "503": says(reply(b"{}", b"503 Service Unavailable")),
        "429": says(reply(b"{}", b"429 Too Many Requests")),
        "no JSON": says(reply(b"choices: x")),
        "half JSON": says(reply(computed[:-2])),
        "a stream": says(STREAM),
        "an error behind a 200": says(reply(b'{"error":{"message":"x","code":500}}')),
        "the engine was asked to stop": says(reply(computed.replace(b'"length"', b'"abort"'))),
        "more than is kept": says(reply(computed + b" " * 5000)),
    }


# Here no other prefiller is asked.
STAYS_WHOLE = {
    "400": says(reply(REFUSED, b"400 Bad Request")),
    "422": says(reply(REFUSED, b"422 Unprocessable Entity")),
    "no parameters": says(reply(KEEPS_NOTHING)),
    "parameters without blocks": says(reply(HANDED.replace(b"[[1,2,3]]", b"[]"))),
}


@pytest.mark.parametrize("fault", first_faults(b""))
@TWO_REQUESTS
async def test_a_first_leg_that_fails_is_computed_by_another_prefiller(way, fault, monkeypatch):
    monkeypatch.setattr(legs, "MOST_KEPT", 5000)
    bad, good, d = Side(first_faults(way.computed)[fault]), way.prefiller(), way.failing(answers)
    async with disaggregated(bad, good, d, way=way, roles=("prefill", "prefill", "decode")) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        await eventually(lambda: s.idle() and d.left == way.at_once)
        assert (bad.legs, good.legs, d.legs) == (["prefill"], ["prefill"], ["decode"] * (1 + way.at_once))
        if way.at_once:
            assert room_of(bad.bodies[0]) == room_of(d.bodies[0]) != room_of(d.bodies[1]) == room_of(good.bodies[0])
        [((reason,), count)] = s.metrics.retries.values.items()
        assert count == 1 and s.metrics.leg_failures.values == {("prefill", reason): 1}
        abandoned = {("decode", "abandoned"): 1} if way.at_once else {}
        assert s.metrics.legs.values == {
            ("prefill", "failed"): 1, ("prefill", "complete"): 1, ("decode", "complete"): 1, **abandoned
        }  # fmt: skip


@pytest.mark.parametrize("fault", STAYS_WHOLE)
async def test_a_first_leg_that_is_refused_or_keeps_nothing_makes_the_request_whole(fault):
    good, d = Side(hands), Side(answers)
    async with disaggregated(Side(STAYS_WHOLE[fault]), good, d, roles=("prefill", "prefill", "decode")) as s:
        assert (await asks(s))[0::2] == (200, ANSWER) and (good.legs, d.legs) == ([], ["whole"])
        await eventually(s.idle)
        [((reason,), count)] = s.metrics.retries.values.items()
        outcome = {"leg refused": "refused", "not kept": "not kept"}[reason]
        assert count == 1 and s.metrics.legs.values == {("prefill", outcome): 1} and not s.metrics.leg_failures.values


@pytest.mark.parametrize("fault", ["dies within its body", "500", "400"])
@TWO_REQUESTS
async def test_a_first_leg_that_fails_where_nobody_else_computes_prompts(way, fault):
    d = way.failing(answers)
    act = (first_faults(way.computed) | STAYS_WHOLE)[fault]
    async with disaggregated(Side(act), d, way=way) as s:
        assert (await asks(s))[0::2] == (200, ANSWER) and d.legs == ["decode"] * way.at_once + ["whole"]


async def test_a_prefiller_that_nobody_reaches():
    d = Side(answers)
    async with disaggregated(d, ports=[free_port()]) as s:
        assert (await asks(s))[0::2] == (200, ANSWER) and d.legs == ["whole"] and s.faults == ["connect"]


async def test_one_that_keeps_nothing_is_asked_once_and_said_once(caplog):
    p, d = Side(says(reply(KEEPS_NOTHING))), Side(answers)
    async with disaggregated(p, d) as s:
        for number in range(3):
            await asks(s, LONG.replace(b"hi", b"%d" % number))
        assert (p.legs, d.legs) == (["prefill"], ["whole"] * 3)
        assert s.metrics.legs.values == {("prefill", "not kept"): 1} and s.faults == []
        assert caplog.text.count("--kv-transfer-config") == 1
        next(iter(s.proxy.backends.values())).follow_incarnation()  # another process
        await asks(s, LONG.replace(b"hi", b"ho"))
        assert len(p.bodies) == 2


@EACH_WAY
async def test_a_prefiller_that_is_lost_is_left(way):
    p, d = way.prefiller(waits), Side(answers) if way is NIXL else Side(waits, answers)
    async with disaggregated(p, d, way=way, request_timeout=60.0) as s:
        talk = await s.say(post(LONG))
        await eventually(lambda: (way is SIDECAR or p.bodies) and (way is NIXL or d.bodies))
        prefiller, _ = s.proxy.backends.values()
        s.becomes(prefiller.replica, State.FAILED)
        assert (await talk.response())[0] == 200 and d.legs[-1] == "whole"
        await eventually(lambda: (way is SIDECAR or p.left == 1) and d.left == (way is not NIXL))


async def test_a_prefiller_whose_answer_does_not_end_is_left_however_it_trickles():
    """It counts from the head, which follows the work, and a byte now and then changes nothing."""
    d = Side(answers)
    async with disaggregated(Side(says(reply(HANDED)[:-9], then="wait")), d, request_timeout=600.0) as s:
        talk = await s.say(post(LONG))
        exchange = await s.exchange(lambda attempt: attempt.withheld)
        began, first = exchange.attempt.sent_at, exchange.attempt
        s.proxy.sweep(began + 100)
        first.data(b" ")
        s.proxy.sweep(began + 109)
        assert exchange.attempt is first and not d.bodies
        s.proxy.sweep(began + 111)
        assert (await talk.response())[0::2] == (200, ANSWER) and d.legs == ["whole"]
        assert s.metrics.leg_failures.values == {("prefill", "hung"): 1}


# --- faults of the second leg

# What a decoder does with a second leg, and whether its transfer may have failed: then the request stays whole.
SECOND_FAULTS = {
    "dies before its answer": (closes, False),
    "dies within its head": (says(SSE_HEAD[:20], then="close"), False),
    "dies before its first event": (says(SSE_HEAD, then="close"), False),
    "503": (says(reply(b"{}", b"503 Service Unavailable")), False),
    "500, as of a failed transfer": (says(reply(b"{}", b"500 Internal Server Error")), True),
    "an error behind a 200": (says(reply(b'{"error":{"message":"x","code":500}}')), True),
}


@pytest.mark.parametrize("fault", SECOND_FAULTS)
@TWO_REQUESTS
async def test_a_second_leg_that_fails_before_its_first_byte(way, fault):
    act, of_transfer = SECOND_FAULTS[fault]
    p, bad, good = way.prefiller(*[waits] * way.at_once, way.computes()), Side(act), Side(answers)
    async with disaggregated(p, bad, good, way=way, roles=("prefill", "decode", "decode")) as s:
        prefiller, failed, _ = s.proxy.backends
        assert (await asks(s))[0::2] == (200, ANSWER)
        await eventually(lambda: s.idle() and p.left == way.at_once)
        assert p.legs == ["prefill"] * (1 if of_transfer else 2)
        assert good.legs == ["whole" if of_transfer else "decode"]
        if way.at_once and not of_transfer:
            assert room_of(good.bodies[0]) == room_of(p.bodies[1]) != room_of(p.bodies[0]) == room_of(bad.bodies[0])
        assert s.proxy.router.transfers.paused(prefiller, failed, 0.0) is of_transfer
        assert s.metrics.legs.values[("decode", "failed")] == 1
        assert s.metrics.legs.total(leg="prefill", outcome="abandoned") == way.at_once


async def test_a_second_leg_that_is_refused_is_said_whole():
    d = Side(says(reply(REFUSED, b"400 Bad Request")), answers)
    async with disaggregated(Side(hands), d) as s:
        assert (await asks(s))[0::2] == (200, ANSWER) and d.legs == ["decode", "whole"]
        await eventually(s.idle)
        assert s.metrics.legs.total(outcome="refused") == 1 and not s.metrics.leg_failures.values


@pytest.fixture
def impatient(monkeypatch):
    """A transfer counts as stalled after 0.3 s."""
    monkeypatch.setattr(legs, "STALLS_SECONDS", 0.3)
    monkeypatch.setattr(legs, "STALLS_TIMES", 1.0)


FAILED_TRANSFER = reply(b"{}", b"500 Internal Server Error")


@pytest.mark.parametrize(
    "said",
    [FAILED_TRANSFER, reply(b'{"error":{"message":"x","code":500}}'), b""],
    ids=["500", "an error behind a 200", "silent"],
)
async def test_a_decoder_computes_all_itself_where_its_transfer_failed_and_nobody_else_is_left(said, impatient):
    """The prefiller died with the cache; that is no fault of the decoder."""

    async def bereft(side, reader, writer):
        prefiller, _ = s.proxy.backends.values()
        s.becomes(prefiller.replica, State.FAILED)
        writer.write(said)

    d = Side(bereft, answers)
    async with disaggregated(Side(hands), d, request_timeout=60.0) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert d.legs == ["decode", "whole"] and s.metrics.retries.total() == 1


FOREIGN = says(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>")


@pytest.mark.parametrize(
    "act", [closes, says(FAILED_TRANSFER), says(reply(b"{}", b"503 No")), FOREIGN], ids=["closes", "500", "503", "html"]
)
async def test_a_decoder_computes_all_itself_where_the_prefiller_fails_the_whole_request(act):
    """The decoder's error is the first that is known of it, so the prefiller is asked for the whole request before."""
    p, d = Side(hands, act), Side(says(FAILED_TRANSFER), answers)
    async with disaggregated(p, d) as s:
        assert (await asks(s))[0::2] == (200, ANSWER) and d.legs == ["decode", "whole"] and p.legs[1] == "whole"


@pytest.mark.parametrize("retries", [2, 4])
async def test_a_decoder_that_failed_the_whole_request_is_not_asked_again(retries):
    d = Side(says(FAILED_TRANSFER), closes)
    async with disaggregated(Side(hands, FOREIGN), d, retries=retries) as s:
        status, _, body = await asks(s)
        assert status in (502, 503) and d.legs == ["decode", "whole"]
        assert b"after 4 attempt(s)" in body, "two legs, and two replicas with the whole request"


@pytest.mark.parametrize("kept", [True, False], ids=["while the lease lasts", "after it"])
async def test_a_decoder_that_nobody_reaches_is_replaced_by_another(kept, monkeypatch):
    """Nothing of the second leg was sent, so the parameters are as good as they were."""
    if not kept:
        monkeypatch.setattr(legs, "MARGIN", 60.0)
    p, d = Side(hands), Side(answers)
    async with disaggregated(p, d, ports=[free_port()], roles=("decode", "prefill", "decode")) as s:
        s.proxy.router.policy._turn = 0  # the first decoder's turn
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert d.legs == ["decode"] and len(p.bodies) == (1 if kept else 2) and s.faults == ["connect"]


async def test_a_decoder_that_is_removed_during_the_first_leg():
    goes_on = asyncio.Event()
    p = Side(says(goes_on, reply(HANDED)))
    async with disaggregated(p, Side(answers), Side(answers), roles=("prefill", "decode", "decode")) as s:
        talk = await s.say(post(LONG))
        exchange = await s.exchange()
        s.proxy.remove(exchange.legs.decoder.id)
        goes_on.set()
        assert (await talk.response())[0] == 200


@TWO_REQUESTS
async def test_an_answer_that_breaks_off_is_cut_as_any(way):
    p = way.prefiller(waits if way.at_once else hands)
    async with disaggregated(p, Side(says(BEGUN, then="close")), way=way) as s:
        _, _, body = await asks(s, STREAMED)
        assert b"the answer broke off" in body and s.metrics.retries.total() == 0
        await eventually(lambda: s.idle() and p.left == way.at_once)
        first = "abandoned" if way.at_once else "complete"
        assert s.metrics.legs.values == {("prefill", first): 1, ("decode", "failed"): 1}
        assert s.metrics.leg_failures.values == {("decode", "closed"): 1}


async def test_an_error_within_an_answer_is_a_leg_that_failed():
    seen, error = asyncio.Event(), b'data: {"error":{"message":"x","type":"InternalServerError","code":500}}\n\n'
    async with disaggregated(Side(hands), Side(says(BEGUN, seen, chunk(error) + ENDS))) as s:
        talk = await s.say(post(STREAMED))
        await talk.until(EVENT)
        seen.set()
        assert error in await talk.until(b"\r\n0\r\n\r\n")
        await eventually(s.idle)
        assert s.metrics.legs.values == {("prefill", "complete"): 1, ("decode", "failed"): 1}
        assert s.metrics.leg_failures.values == {("decode", "error answer"): 1}


@pytest.mark.parametrize("said", [b"", reply()[:30]], ids=["silent", "half a head"])
@EACH_WAY
async def test_a_transfer_that_stalls_is_given_up_long_before_the_request_is(way, said, impatient):
    p, stalled, good = (
        way.prefiller(*[waits] * way.at_once, way.computes()),
        Side(says(said, then="wait")),
        Side(answers),
    )
    roles = ("prefill", "decode", "decode")
    async with disaggregated(p, stalled, good, way=way, roles=roles, request_timeout=60.0) as s:
        prefiller, other, _ = s.proxy.backends
        assert (await asks(s))[0::2] == (200, ANSWER)
        await eventually(lambda: stalled.left == 1 and (way is SIDECAR or p.left == way.at_once))
        assert s.metrics.retries.values == {("transfer stalled",): 1} and good.legs == ["whole"]
        assert s.proxy.router.transfers.paused(prefiller, other, 0.0), "this pair is left out for a while"


@pytest.mark.parametrize(
    "lie",
    [
        written(prompt_tokens=10**17), written(prompt_tokens=-1), written(prompt_tokens="95"), written(completion_tokens=[1]),
        written(prompt_tokens_details={"cached_tokens": 10**17}), written(prompt_tokens_details=7), b"{" * 5000, b"null",  # the last two are no answers
        json.dumps(CHOICES | {"usage": USED, "kv_transfer_params": {"x": "y" * 3_000_000}}).encode(), HANDED,
        ANSWER + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)  # fmt: skip
async def test_a_decoder_that_lies_spoils_nothing_beside_it(lie):
    """Its clients get what it says; what it counts is not believed, and the other decoder serves as before."""
    p, liar, honest = Side(hands), Side(says(reply(lie))), Side(answers)
    async with disaggregated(p, liar, honest, roles=("prefill", "decode", "decode")) as s:
        first, second, third = [one.replica for one in s.proxy.backends.values()]
        s.becomes(third, State.DRAINING)
        status, _, body = await asks(s)
        answers_at_all = lie not in (b"{" * 5000, b"null")
        assert (status, body) == (200, lie if answers_at_all else HANDED) and not honest.bodies
        assert p.legs == ["prefill"] if answers_at_all else ["prefill", "whole"]
        third.state, second.state = State.READY, State.DRAINING
        s.proxy.changed()
        assert (await asks(s))[0::2] == (200, ANSWER) and honest.legs == ["decode"]
        await eventually(s.idle)
        assert {first.state, third.state} == {State.READY}
        assert s.metrics.legs.total(outcome="failed") == (not answers_at_all)


# --- clients that leave, and time that runs out


def half(s):
    """A part of a first leg's answer is there."""
    return any(a.withheld for x in s.proxy.exchanges for a in x.attempts)


def begun(s):
    return any(x.attempts and x.attempts[-1].pieces for x in s.proxy.exchanges)


def computed(s):
    return s.metrics.legs.total(leg="prefill", outcome="complete")


HALF = says(reply(HANDED)[:-9], then="wait")
# What the prefiller and the decoder do, when the client leaves, and how many requests each drops then. A decoder that
# has the request is taken to hold its prompt.
MOMENTS = {
    "nixl: the prefiller has it": (NIXL, waits, waits, lambda s: sent(s, legs.Leg.PREFILL), (1, 0)),
    "nixl: half of the first answer is there": (NIXL, HALF, waits, half, (1, 0)),
    "nixl: the decoder has it": (NIXL, hands, waits, lambda s: sent(s, legs.Leg.DECODE), (0, 1)),
    "nixl: the answer has begun": (NIXL, hands, begins, begun, (0, 1)),
    "mooncake: both have it": (MOONCAKE, waits, waits, lambda s: sent(s, legs.Leg.PREFILL) and sent(s, legs.Leg.DECODE), (1, 1)),
    "mooncake: half of the first answer is there": (MOONCAKE, HALF, waits, lambda s: half(s) and sent(s, legs.Leg.DECODE), (1, 1)),
    "mooncake: the prompt is computed": (MOONCAKE, MOONCAKE.computes(), waits, lambda s: computed(s) and sent(s, legs.Leg.DECODE), (0, 1)),
    "mooncake: the answer has begun, the first has not ended": (MOONCAKE, waits, begins, lambda s: sent(s, legs.Leg.PREFILL) and begun(s), (1, 1)),
    "mooncake: the answer has begun": (MOONCAKE, MOONCAKE.computes(), begins, lambda s: computed(s) and begun(s), (0, 1)),
    "sidecar: nothing is there": (SIDECAR, None, waits, lambda s: sent(s, legs.Leg.DECODE), (0, 1)),
    "sidecar: the answer has begun": (SIDECAR, None, begins, begun, (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves(moment):
    way, first, second, reached, left = MOMENTS[moment]
    p, d = way.prefiller(first), Side(second)
    async with disaggregated(p, d, way=way) as s:
        talk = await s.say(post(STREAMED))
        await eventually(lambda: reached(s) and (not left[0] or p.bodies) and (not left[1] or d.bodies))
        assert not s.idle()
        await talk.close()
        await eventually(s.idle)
        await eventually(lambda: (way is SIDECAR or p.left == left[0]) and d.left == left[1])
        assert s.metrics.client_aborts.total() == 1 and s.metrics.legs.total(outcome="abandoned") == sum(left)
        assert not s.metrics.leg_failures.values and (held(s)[1] > 0) is bool(left[1])


@TWO_REQUESTS
async def test_a_client_that_leaves_while_a_decoder_is_being_connected(way):
    p, d = way.prefiller(), Side(answers)
    async with disaggregated(p, d, way=way) as s:
        for backend in [*s.proxy.backends.values()][not way.at_once :]:
            backend.pool.connect = lambda *asked: None
        talk = await s.say(post(LONG))
        await eventually(lambda: any(len(x.attempts) == 2 for x in s.proxy.exchanges))
        await talk.close()
        await eventually(s.idle)
        assert len(p.bodies) == (not way.at_once) and not d.bodies and held(s)[1] == 0
        assert s.metrics.client_aborts.total() == 1


@TWO_REQUESTS
async def test_a_request_that_takes_too_long(way):
    p, d = way.prefiller(waits), Side(waits)
    async with disaggregated(p, d, way=way, request_timeout=0.3) as s:
        assert (await asks(s))[0] == 504
        await eventually(lambda: s.idle() and (p.left, d.left) == (1, way.at_once))
        assert s.metrics.leg_failures.total(reason="timeout") == s.metrics.legs.total(outcome="failed") == 1
