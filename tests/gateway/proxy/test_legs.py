"""Requests in two legs between real sockets: what each replica is sent, what the client gets, what follows faults."""

import asyncio
import json
import random
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from gateway.proxy.disagg import legs
from policies import Demand, two_legs
from replicas import State
from replicas.lifecycle import Event

from ..http.talk import eventually, free_port, read_request
from .replies import ANSWER, BODY, EVENT, LONG, SSE_HEAD, answers, chunk, post, reply, says, silent, streams
from .stack import stack

PARAMETERS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e-1",
    "remote_request_id": "r-1", "remote_host": "10.0.0.1", "remote_port": 5600, "more": {"in": [1.5, None]},
}  # fmt: skip
CHOICES = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}]}
USED = {"prompt_tokens": 95, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
HANDED = json.dumps(CHOICES | {"usage": USED, "kv_transfer_params": PARAMETERS}, separators=(",", ":")).encode()
KEEPS_NOTHING = json.dumps(CHOICES | {"usage": USED, "kv_transfer_params": None}).encode()
ABORTED = HANDED.replace(b'"length"', b'"abort"')
# What a completion's text is, and what a client that talks to one replica would get.
STREAM = [chunk(EVENT), chunk(EVENT)]


@asynccontextmanager
async def disaggregated(*scripts, roles=("prefill", "decode"), **options):
    """A stack whose replicas have these roles."""
    async with stack(*scripts, **options) as s:
        give_roles(s, *roles)
        yield s


def give_roles(s, *roles):
    for backend, role in zip(list(s.proxy.backends.values()), roles, strict=True):
        backend.replica.role = role
    s.proxy.changed()


def legs_of(seen):
    """Which leg each request was, by its body: prefill, decode or whole."""
    return [leg_of(json.loads(body)) for _, body in seen]


def leg_of(body):
    told = body.get("kv_transfer_params") or {}
    return "prefill" if told.get("do_remote_decode") else "decode" if told.get("do_remote_prefill") else "whole"


async def asks(s, body=LONG, **more):
    return await s.ask(post(body, **more))


async def test_the_prompt_goes_to_the_prefiller_and_the_answer_comes_from_the_decoder():
    first, second = [], []
    async with disaggregated(answers(HANDED, seen=first), answers(seen=second), cached_tokens_header=True) as s:
        prefiller, decoder = s.proxy.backends.values()
        status, headers, body = await asks(s, LONG.replace(b"{", b'{"stream_options": {}, "max_tokens": 40, ', 1))
        assert (status, body, headers["x-hitherto-replica"]) == (200, ANSWER, decoder.id)
        asked, handed = json.loads(first[0][1]), json.loads(second[0][1])
        assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
        assert asked == json.loads(LONG) | {"max_tokens": 1, "stream": False}
        assert handed.pop("kv_transfer_params") == PARAMETERS
        assert handed == json.loads(LONG) | {"max_tokens": 40, "stream_options": {}}
        await eventually(s.idle)
        counted = s.metrics
        assert counted.legs.values == {("prefill", "complete"): 1, ("decode", "complete"): 1}
        assert counted.leg_choices.total(choice="apart") == 1
        # what was computed and found is the prefiller's, and the decoder's part of the map has the prompt as well
        assert counted.predictions.values == {(prefiller.id, "equal"): 1}
        (hashes,) = {tuple(s.proxy.models.routes.prepare("/v1/chat/completions", LONG, None, ()).hashes)}
        held = s.proxy.router.map.match(list(hashes), 0.0).held
        assert held[prefiller.slot] == held[decoder.slot] == len(hashes) > 1
        assert (await asks(s))[0] == 200 and legs_of(first) == ["prefill"] and legs_of(second)[1:] == ["whole"]


async def test_the_clients_stream_is_the_second_legs():
    async with disaggregated(answers(HANDED), streams(*STREAM)) as s:
        status, _, body = await asks(s, LONG.replace(b"{", b'{"stream": true, ', 1))
        assert status == 200 and body == EVENT + EVENT + b"data: [DONE]\n\n"
        await eventually(s.idle)
        assert s.metrics.transfer_seconds.count(list(s.proxy.backends)[1]) == 1


def taught(s, seconds):
    """Have the only pair's transfers take so long, and return what says how long it thinks that they take."""
    prefiller, decoder = s.proxy.backends
    transfers, now = s.proxy.router.transfers, monotonic()
    for _ in range(100):
        transfers.observe(prefiller, decoder, 96, seconds, now)
    return lambda: transfers.seconds(prefiller, decoder, 96, now)


WRITTEN = json.dumps(CHOICES | {"usage": USED | {"completion_tokens": 2}}).encode()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
async def test_what_a_transfer_took_is_learned_of_any_answer(stream):
    second = streams(*STREAM) if stream else answers(WRITTEN)
    async with disaggregated(answers(HANDED), second) as s:
        price = taught(s, 10.0)
        before = price()
        body = LONG.replace(b"{", b'{"stream": true, ', 1) if stream else LONG
        assert before == pytest.approx(10.0, rel=0.1) and (await asks(s, body))[0] == 200
        await eventually(s.idle)
        assert price() < 0.9 * before, "it took milliseconds"
        assert s.metrics.transfer_seconds.count([*s.proxy.backends][1]) == 1


async def test_of_a_long_answer_in_one_piece_nothing_is_learned_about_its_transfer():
    """What is left of seconds once its writing is taken away is the error of that prediction."""
    long = json.dumps(CHOICES | {"usage": USED | {"completion_tokens": 100_000}}).encode()
    async with disaggregated(answers(HANDED), answers(long)) as s:
        price = taught(s, 0.1)
        before = price()
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        assert price() == before and not s.metrics.transfer_seconds.count([*s.proxy.backends][1])


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
async def test_of_a_prefiller_that_stood_still_meanwhile_no_price_is_learned(stream):
    goes_on, asked = asyncio.Event(), asyncio.Event()

    async def waits(reader, writer):
        await read_request(reader)
        asked.set()
        await goes_on.wait()
        writer.write(SSE_HEAD + STREAM[0] + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n" if stream else reply(WRITTEN))
        await reader.read()

    async with disaggregated(answers(HANDED), waits) as s:
        price, prefiller = taught(s, 10.0), next(iter(s.proxy.backends.values()))
        before = price()
        talk = await s.say(post(LONG.replace(b"{", b'{"stream": true, ', 1) if stream else LONG))
        await asked.wait()
        prefiller.replica.apply(Event.TROUBLE, "no answer to two probes", monotonic())
        prefiller.replica.apply(Event.SERVES, "answers probes again", monotonic())
        goes_on.set()
        assert (await talk.response())[0] == 200
        await eventually(s.idle)
        assert prefiller.replica.state is State.READY and price() == before


async def test_what_the_decoder_says_was_cached_is_compared_with_nothing():
    """It came from elsewhere: predicted was what the prefiller holds."""
    fetched = json.dumps(CHOICES | {"usage": USED | {"prompt_tokens_details": {"cached_tokens": 80}}}).encode()
    async with disaggregated(answers(HANDED), answers(fetched)) as s:
        prefiller, decoder = s.proxy.backends
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        assert {replica for replica, _ in s.metrics.predictions.values} == {prefiller}
        assert not s.metrics.reported_cached_tokens.total(replica=decoder)
        assert s.metrics.prompt_tokens.total(replica=prefiller) == s.metrics.prompt_tokens.total() > 0


@pytest.mark.parametrize(
    "policy", ["round_robin", "random", "least_load", "power_of_two", "consistent_hash", "prefix_affinity"]
)
async def test_a_policy_without_seconds_keeps_to_the_roles(policy):
    """Prompts of more than a block are computed by those with role=prefill, and by nobody else; answers they write
    none."""
    first, second = [], []
    async with disaggregated(
        answers(HANDED, seen=first),
        answers(HANDED, seen=first),
        answers(seen=second),
        answers(seen=second),
        roles=("prefill", "prefill", "decode", "decode"),
        policy=policy,
    ) as s:
        for number in range(6):
            body = LONG.replace(b"hi ", b"%d " % number, 200)
            status, headers, _ = await asks(s, body)
            assert status == 200
            assert (await asks(s, BODY))[0] == 200
        await eventually(s.idle)
        assert legs_of(first) == ["prefill"] * 6
        assert sorted(legs_of(second)) == ["decode"] * 6 + ["whole"] * 6


async def test_least_time_goes_apart_by_itself_where_a_prompt_would_hold_up_many_streams():
    """Long prompts among chats: those are computed elsewhere, the chats' own where they are answered."""
    first, second = [], []
    async with disaggregated(answers(HANDED, seen=first), answers(seen=second), policy="least_time") as s:
        router, [_, decoder] = s.proxy.router, [*s.proxy.backends.values()]
        long = LONG.replace(b"hi " * 100, b"hi there " * 20_000)
        assert (await asks(s, long))[0] == 200 and legs_of(second) == ["whole"], "nobody is held up yet"
        streams_there = [
            two_legs.commit_decoder(router, Demand(4000), decoder.candidate, monotonic()) for _ in range(66)
        ]
        assert (await asks(s, long.replace(b"hi", b"ho")))[0] == 200
        assert (legs_of(first), legs_of(second)) == (["prefill"], ["whole", "decode"])
        assert (await asks(s, LONG))[0] == 200
        assert legs_of(first) == ["prefill"] and legs_of(second)[2:] == ["whole"], "a chat's is soon computed"
        for one in streams_there:
            router.abandon(one, computed=False)


async def test_without_roles_nothing_has_two_legs():
    seen = []
    async with stack(answers(seen=seen), answers(seen=seen)) as s:
        for _ in range(4):
            assert (await asks(s))[0] == 200
        assert legs_of(seen) == ["whole"] * 4 and not s.metrics.leg_choices.total()


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
    first, second = [], []
    async with disaggregated(answers(HANDED, seen=first), answers(seen=second)) as s:
        assert (await asks(s, body))[0::2] == (200, ANSWER)
        assert not first and second[0][1] == body


async def test_a_prefiller_gets_whole_requests_only_if_nobody_else_is_there():
    seen = []
    async with disaggregated(answers(seen=seen), answers()) as s:
        for _ in range(4):
            await asks(s, BODY)
        assert not seen
        _, decoder = s.proxy.backends.values()
        s.becomes(decoder.replica, State.FAILED)
        for _ in range(3):
            assert (await asks(s))[0] == 200
        assert legs_of(seen) == ["whole"] * 3


async def test_a_role_without_a_counterpart_is_complained_of_once(caplog):
    async with disaggregated(answers(), answers(), roles=("prefill", "prefill")) as s:
        s.proxy.changed()
        assert caplog.text.count("none has role=decode") == 1 and "#role=decode" in caplog.text
        give_roles(s, "decode", "decode")
        assert caplog.text.count("none has role=prefill") == 1
        give_roles(s, "decode", "both")
        assert caplog.text.count("none has role") == 2


# What becomes of the first leg, and what the prefillers and decoders are asked: two of the first, the second is well.
REFUSED = b'{"error":{"message":"no","type":"BadRequestError","code":400}}'
FIRST_FAULTS = {
    "dies before its answer": (says(b"", then_hangs=False), ["prefill"], ["decode"]),
    "dies within its head": (says(b"HTTP/1.1 200 OK\r\nContent-", then_hangs=False), ["prefill"], ["decode"]),
    "dies within its body": (says(reply(HANDED)[:-9], then_hangs=False), ["prefill"], ["decode"]),
    "says what is no HTTP": (says(b"SSH-2.0-OpenSSH\r\n"), ["prefill"], ["decode"]),
    "500": (answers(b"{}", b"500 Internal Server Error"), ["prefill"], ["decode"]),
    "503": (answers(b"{}", b"503 Service Unavailable"), ["prefill"], ["decode"]),
    "429": (answers(b"{}", b"429 Too Many Requests"), ["prefill"], ["decode"]),
    "no JSON": (answers(b"choices: x"), ["prefill"], ["decode"]),
    "half JSON": (answers(HANDED[:-2]), ["prefill"], ["decode"]),
    "a stream": (streams(*STREAM), ["prefill"], ["decode"]),
    "an error behind a 200": (answers(b'{"error":{"message":"x","code":500}}'), ["prefill"], ["decode"]),
    "the engine was asked to stop": (answers(ABORTED), ["prefill"], ["decode"]),
    "400": (answers(REFUSED, b"400 Bad Request"), [], ["whole"]),
    "422": (answers(REFUSED, b"422 Unprocessable Entity"), [], ["whole"]),
    "no parameters": (answers(KEEPS_NOTHING), [], ["whole"]),
    "parameters without blocks": (answers(HANDED.replace(b"[[1,2,3]]", b"[]")), [], ["whole"]),
    "more than is kept": (answers(HANDED + b" " * 5000), ["prefill"], ["decode"]),
}


@pytest.mark.parametrize("fault", FIRST_FAULTS)
async def test_a_first_leg_that_fails(fault, monkeypatch):
    monkeypatch.setattr(legs, "MOST_KEPT", 5000)
    script, others, answering = FIRST_FAULTS[fault]
    prefilled, answered = [], []
    async with disaggregated(
        script, answers(HANDED, seen=prefilled), answers(seen=answered), roles=("prefill", "prefill", "decode")
    ) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert (legs_of(prefilled), legs_of(answered)) == (others, answering)
        await eventually(s.idle)
        assert s.metrics.retries.total() == 1 and s.metrics.legs.total(leg="decode") == (answering == ["decode"])
        [((reason,), count)] = s.metrics.retries.values.items()
        outcome = {"leg refused": "refused", "not kept": "not kept"}.get(reason, "failed")
        assert count == 1 and s.metrics.legs.values[("prefill", outcome)] == 1
        assert s.metrics.leg_failures.values == ({("prefill", reason): 1} if outcome == "failed" else {})


@pytest.mark.parametrize("fault", ["dies within its body", "500", "400"])
async def test_a_first_leg_that_fails_where_nobody_else_computes_prompts(fault, monkeypatch):
    monkeypatch.setattr(legs, "MOST_KEPT", 5000)
    answered = []
    async with disaggregated(FIRST_FAULTS[fault][0], answers(seen=answered)) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert legs_of(answered) == ["whole"]


async def test_a_prefiller_that_nobody_reaches():
    answered = []
    async with disaggregated(answers(seen=answered), ports=[free_port()]) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert legs_of(answered) == ["whole"] and s.faults == ["connect"]


async def test_one_that_keeps_nothing_is_asked_once_and_said_once(caplog):
    prefilled, answered = [], []
    async with disaggregated(answers(KEEPS_NOTHING, seen=prefilled), answers(seen=answered)) as s:
        prefiller, _ = s.proxy.backends.values()
        for number in range(3):
            await asks(s, LONG.replace(b"hi", b"%d" % number))
        assert (legs_of(prefilled), legs_of(answered)) == (["prefill"], ["whole"] * 3)
        assert s.metrics.legs.values == {("prefill", "not kept"): 1} and s.faults == []
        assert caplog.text.count("--kv-transfer-config") == 1
        prefiller.follow_incarnation()  # another process
        await asks(s, LONG.replace(b"hi", b"ho"))
        assert len(prefilled) == 2


async def test_a_first_legs_answer_in_chunks():
    body = b"".join(chunk(HANDED[at : at + 50]) for at in range(0, len(HANDED), 50)) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    answered = []
    async with disaggregated(says(head + body), answers(seen=answered)) as s:
        assert (await asks(s))[0] == 200
        assert json.loads(answered[0][1])["kv_transfer_params"] == PARAMETERS


# What the first decoder does with the second leg; what the prefiller and the second decoder are asked.
SECOND_FAULTS = {
    "dies before its answer": (says(b"", then_hangs=False), ["prefill"] * 2, ["decode"]),
    "dies within its head": (says(SSE_HEAD[:20], then_hangs=False), ["prefill"] * 2, ["decode"]),
    "dies before its first event": (says(SSE_HEAD, then_hangs=False), ["prefill"] * 2, ["decode"]),
    "503": (answers(b"{}", b"503 Service Unavailable"), ["prefill"] * 2, ["decode"]),
    "500, as of a failed transfer": (answers(b"{}", b"500 Internal Server Error"), ["prefill"], ["whole"]),
    "an error behind a 200": (answers(b'{"error":{"message":"x","code":500}}'), ["prefill"], ["whole"]),
}


@pytest.mark.parametrize("fault", SECOND_FAULTS)
async def test_a_second_leg_that_fails_before_its_first_byte(fault):
    script, prefills, others = SECOND_FAULTS[fault]
    prefilled, answered = [], []
    async with disaggregated(
        answers(HANDED, seen=prefilled), script, answers(seen=answered), roles=("prefill", "decode", "decode")
    ) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert (legs_of(prefilled), legs_of(answered)) == (prefills, others)


async def test_a_second_leg_that_is_refused_is_said_whole():
    seen = []

    async def picky(reader, writer):
        while True:
            seen.append(await read_request(reader))
            leg = leg_of(json.loads(seen[-1][1]))
            writer.write(reply() if leg == "whole" else reply(REFUSED, b"400 Bad Request"))

    async with disaggregated(answers(HANDED), picky) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert legs_of(seen) == ["decode", "whole"]
        await eventually(s.idle)
        assert s.metrics.legs.total(outcome="refused") == 1 and not s.metrics.leg_failures.values


UNFETCHED = {
    "500": reply(b"{}", b"500 Internal Server Error"),
    "an error behind a 200": reply(b'{"error":{"message":"x","code":500}}'),
    "silent": b"",
}


@pytest.mark.parametrize("said", UNFETCHED)
async def test_a_decoder_computes_all_itself_where_its_transfer_failed_and_nobody_else_is_left(said, monkeypatch):
    """The prefiller died with the cache; that is no fault of the decoder."""
    monkeypatch.setattr(legs, "STALLS_SECONDS", 0.3)
    monkeypatch.setattr(legs, "STALLS_TIMES", 1.0)
    seen = []

    async def bereft(reader, writer):
        while True:
            seen.append(await read_request(reader))
            whole = leg_of(json.loads(seen[-1][1])) == "whole"
            prefiller, _ = s.proxy.backends.values()
            s.becomes(prefiller.replica, State.FAILED)
            writer.write(reply() if whole else UNFETCHED[said])

    async with disaggregated(answers(HANDED), bereft, request_timeout=60.0) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert legs_of(seen) == ["decode", "whole"] and s.metrics.retries.total() == 1


@asynccontextmanager
async def refused_by_the_prefiller(asked_whole, answer_whole, retries=2):
    """A pair whose prefiller hands a prompt over and answers the whole request with `asked_whole`, or closes. The
    decoder cannot fetch the cache and answers the whole request with `answer_whole`, or closes. Gives what the client
    got and which requests the decoder was sent."""
    seen = []

    async def prefills(reader, writer):
        while True:
            _, body = await read_request(reader)
            writer.write(reply(HANDED) if leg_of(json.loads(body)) == "prefill" else asked_whole)
            if not asked_whole:
                writer.close()

    async def bereft(reader, writer):
        while True:
            seen.append(await read_request(reader))
            whole = leg_of(json.loads(seen[-1][1])) == "whole"
            writer.write(answer_whole if whole else UNFETCHED["500"])
            if whole and not answer_whole:
                writer.close()

    async with disaggregated(prefills, bereft, retries=retries) as s:
        yield await asks(s), legs_of(seen)


WHOLE_FAULTS = {
    "closes": b"",
    "500": reply(b"{}", b"500 Internal Server Error"),
    "503": reply(b"{}", b"503 Service Unavailable"),
    "no engine": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>",
}


@pytest.mark.parametrize("fault", WHOLE_FAULTS)
async def test_a_decoder_computes_all_itself_where_the_prefiller_fails_the_whole_request(fault):
    """The decoder's error is the first that is known of it, so the prefiller is asked for the whole request before."""
    async with refused_by_the_prefiller(WHOLE_FAULTS[fault], reply()) as (answer, asked):
        assert answer[0::2] == (200, ANSWER) and asked == ["decode", "whole"]


@pytest.mark.parametrize("retries", [2, 4])
async def test_a_decoder_that_failed_the_whole_request_is_not_asked_again(retries):
    async with refused_by_the_prefiller(WHOLE_FAULTS["no engine"], b"", retries) as ((status, _, body), asked):
        assert status in (502, 503) and asked == ["decode", "whole"]
        assert b"after 4 attempt(s)" in body, "two legs, and two replicas with the whole request"


@pytest.mark.parametrize("kept", [True, False], ids=["while the lease lasts", "after it"])
async def test_a_decoder_that_nobody_reaches_is_replaced_by_another(kept, monkeypatch):
    """Nothing of the second leg was sent, so the parameters are as good as they were."""
    if not kept:
        monkeypatch.setattr(legs, "MARGIN", 60.0)
    prefilled, answered = [], []
    async with disaggregated(
        answers(HANDED, seen=prefilled),
        answers(seen=answered),
        ports=[free_port()],
        roles=("decode", "prefill", "decode"),
    ) as s:
        s.proxy.router.policy._turn = 0  # the first decoder's turn
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert legs_of(answered) == ["decode"] and len(prefilled) == (1 if kept else 2)
        assert s.faults == ["connect"]


async def test_a_decoder_that_is_removed_during_the_first_leg():
    goes_on, answered = asyncio.Event(), []

    async def slow(reader, writer):
        await read_request(reader)
        await goes_on.wait()
        writer.write(reply(HANDED))
        await reader.read()

    async with disaggregated(slow, answers(), answers(seen=answered), roles=("prefill", "decode", "decode")) as s:
        talk = await s.say(post(LONG))
        exchange = await s.exchange()
        s.proxy.remove(exchange.legs.decoder.id)
        goes_on.set()
        assert (await talk.response())[0] == 200


async def test_an_answer_that_breaks_off_is_cut_as_any():
    async with disaggregated(answers(HANDED), streams(*STREAM, end=None)) as s:
        _, _, body = await asks(s, LONG.replace(b"{", b'{"stream": true, ', 1))
        assert b"the answer broke off" in body and s.metrics.retries.total() == 0
        await eventually(s.idle)
        assert s.metrics.legs.values == {("prefill", "complete"): 1, ("decode", "failed"): 1}
        assert s.metrics.leg_failures.values == {("decode", "closed"): 1}


LATE_ERROR = b'data: {"error":{"message":"out of memory","type":"InternalServerError","code":500}}\n\n'


async def test_an_error_within_an_answer_is_a_leg_that_failed():
    seen = asyncio.Event()
    async with disaggregated(answers(HANDED), streams(chunk(EVENT), chunk(LATE_ERROR), pause=seen.wait)) as s:
        talk = await s.say(post(LONG.replace(b"{", b'{"stream": true, ', 1)))
        await talk.until(EVENT)
        seen.set()
        assert LATE_ERROR in await talk.until(b"\r\n0\r\n\r\n")
        await eventually(s.idle)
        assert s.metrics.legs.values == {("prefill", "complete"): 1, ("decode", "failed"): 1}
        assert s.metrics.leg_failures.values == {("decode", "error answer"): 1}


async def hangs_within_its_answer(reader, writer):
    await read_request(reader)
    writer.write(reply(HANDED)[:-9])
    await reader.read()


async def hangs_within_its_stream(reader, writer):
    await read_request(reader)
    writer.write(SSE_HEAD + chunk(EVENT))
    await reader.read()


def sent(s, leg):
    return any(one.attempts and one.attempts[-1].leg is leg and one.attempts[-1].sent_at for one in s.proxy.exchanges)


MOMENTS = {
    "the prefiller has it": (silent, silent, lambda s: sent(s, legs.Leg.PREFILL)),
    "half of the first answer is there": (hangs_within_its_answer, silent, lambda s: any(x.attempts and x.attempts[-1].withheld for x in s.proxy.exchanges)),
    "the decoder is being connected": (answers(HANDED), silent, lambda s: any(x.attempts and x.attempts[-1].leg is legs.Leg.DECODE for x in s.proxy.exchanges)),
    "the decoder has it": (answers(HANDED), silent, lambda s: sent(s, legs.Leg.DECODE)),
    "the answer has begun": (answers(HANDED), hangs_within_its_stream, lambda s: any(x.attempts and x.attempts[-1].pieces for x in s.proxy.exchanges)),
}  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves(moment):
    first, second, reached = MOMENTS[moment]
    async with disaggregated(first, second) as s:
        if "connected" in moment:
            _, decoder = s.proxy.backends.values()
            decoder.pool.connect = lambda *asked: None
        talk = await s.say(post(LONG))
        await eventually(lambda: reached(s))
        assert not s.idle()
        await talk.close()
        await eventually(s.idle)
        assert s.metrics.client_aborts.total() == 1 and s.metrics.legs.total(outcome="abandoned") == 1
        assert not s.metrics.leg_failures.values
        held = s.proxy.router.map.match(
            list(s.proxy.models.routes.prepare("/v1/chat/completions", LONG, None, ()).hashes), 0.0
        ).held
        _, decoder = s.proxy.backends.values()
        assert (held[decoder.slot] > 0) is ("decoder has" in moment or "begun" in moment), "what is expected there"


async def test_a_request_that_takes_too_long_in_its_first_leg():
    async with disaggregated(silent, answers(), request_timeout=0.3) as s:
        assert (await asks(s))[0] == 504
        await eventually(s.idle)
        assert s.metrics.legs.values == {("prefill", "failed"): 1}
        assert s.metrics.leg_failures.values == {("prefill", "timeout"): 1}


async def test_a_prefiller_that_hangs_is_left():
    answered = []
    async with disaggregated(silent, answers(seen=answered), request_timeout=60.0) as s:
        talk = await s.say(post(LONG))
        await eventually(lambda: sent(s, legs.Leg.PREFILL))
        prefiller, _ = s.proxy.backends.values()
        s.becomes(prefiller.replica, State.FAILED)
        assert (await talk.response())[0] == 200 and legs_of(answered) == ["whole"]


async def test_a_prefiller_whose_answer_does_not_end_is_left_however_it_trickles():
    """It counts from the head, which follows the work, and a byte now and then changes nothing."""
    answered = []
    async with disaggregated(hangs_within_its_answer, answers(seen=answered), request_timeout=600.0) as s:
        talk = await s.say(post(LONG))
        exchange = await s.exchange(lambda attempt: attempt.withheld)
        began, first = exchange.attempt.sent_at, exchange.attempt
        s.proxy.sweep(began + 100)
        first.data(b" ")
        s.proxy.sweep(began + 109)
        assert exchange.attempt is first and not answered
        s.proxy.sweep(began + 111)
        assert (await talk.response())[0::2] == (200, ANSWER) and legs_of(answered) == ["whole"]
        assert s.metrics.leg_failures.values == {("prefill", "hung"): 1}


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"], ids=["silent", "half a head"]
)
async def test_a_transfer_that_stalls_is_given_up_long_before_the_request_is(said, monkeypatch):
    monkeypatch.setattr(legs, "STALLS_SECONDS", 0.3)
    monkeypatch.setattr(legs, "STALLS_TIMES", 1.0)
    prefilled, answered = [], []
    async with disaggregated(
        answers(HANDED, seen=prefilled), says(said), answers(seen=answered),
        roles=("prefill", "decode", "decode"), request_timeout=60.0,
    ) as s:  # fmt: skip
        prefiller, stalled, _ = s.proxy.backends
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert (legs_of(prefilled), legs_of(answered)) == (["prefill"], ["whole"])
        assert s.metrics.retries.total(reason="transfer stalled") == 1
        assert s.proxy.router.transfers.paused(prefiller, stalled, 0.0), "this pair is left out for a while"


def _lie(**usage):
    return json.dumps(CHOICES | {"usage": USED | usage}).encode()


@pytest.mark.parametrize(
    "lie",
    [
        _lie(prompt_tokens=10**17), _lie(prompt_tokens=-1), _lie(prompt_tokens="95"), _lie(completion_tokens=[1]),
        _lie(prompt_tokens_details={"cached_tokens": 10**17}), _lie(prompt_tokens_details=7), b"{" * 5000, b"null",  # the last two are no answers
        json.dumps(CHOICES | {"usage": USED, "kv_transfer_params": {"x": "y" * 3_000_000}}).encode(), HANDED,
        ANSWER + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)  # fmt: skip
async def test_a_decoder_that_lies_spoils_nothing_beside_it(lie):
    """Its clients get what it says; what it counts is not believed, and the other decoder serves as before."""
    prefilled, told = [], []
    async with disaggregated(
        answers(HANDED, seen=prefilled), answers(lie), answers(seen=told), roles=("prefill", "decode", "decode")
    ) as s:
        prefiller, liar, honest = s.proxy.backends.values()
        s.becomes(honest.replica, State.DRAINING)
        status, _, body = await asks(s)
        answers_at_all = lie not in (b"{" * 5000, b"null")
        assert (status, body) == (200, lie if answers_at_all else HANDED) and not told
        assert legs_of(prefilled) == ["prefill"] if answers_at_all else ["prefill", "whole"]
        honest.replica.state, liar.replica.state = State.READY, State.DRAINING
        s.proxy.changed()
        assert (await asks(s))[0::2] == (200, ANSWER) and legs_of(told) == ["decode"]
        await eventually(s.idle)
        assert {prefiller.replica.state, honest.replica.state} == {State.READY}
        assert s.metrics.legs.total(outcome="failed") == (not answers_at_all)


async def crowd(s, dice):
    """Sixty clients that ask within 0.2 s, of which some leave at random."""

    async def one(number):
        await asyncio.sleep(dice.random() * 0.2)
        talk = await s.say(post(LONG.replace(b"hi", b"%d" % number)))
        if dice.random() < 0.4:
            await asyncio.sleep(dice.random() * 0.03)
            await talk.close()
        else:
            await talk.rest() if dice.random() < 0.1 else await talk.until(b"\r\n\r\n")

    await asyncio.gather(*[one(number) for number in range(60)], return_exceptions=True)
    for talk in s.talkers:
        await talk.close()
    await eventually(s.idle)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_nothing_stays_reserved(seed):
    """Sixty requests of random lives: replicas that fail at random at every step, clients that leave at random."""
    dice = random.Random(seed)

    async def whatever(reader, writer):
        while True:
            _, raw = await read_request(reader)
            await asyncio.sleep(dice.choice((0, 0, 0.002, 0.01)))
            told = json.loads(raw)
            luck = dice.random()
            if luck < 0.08:
                return
            if luck < 0.16:
                writer.write(reply(b"{}", dice.choice((b"500 Internal Server Error", b"503 Busy", b"400 Bad Request"))))
            elif leg_of(told) == "prefill":
                writer.write(reply(dice.choice((HANDED, HANDED, HANDED, HANDED[:-3], KEEPS_NOTHING, ABORTED))))
            else:
                writer.write(SSE_HEAD + chunk(EVENT))
                await writer.drain()
                if luck < 0.25:
                    return
                writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with disaggregated(*[whatever] * 5, roles=("prefill", "prefill", "decode", "decode", "both")) as s:
        for backend in s.proxy.backends.values():
            backend.keeps_nothing = Forgetful()
        s.proxy.deadlines._idle_timeout = 1.0
        await crowd(s, dice)
        assert s.metrics.legs.total(leg="decode", outcome="complete") > 0


class Forgetful(set):
    """Else the first answer without parameters would end all legs."""

    def add(self, _):
        pass
