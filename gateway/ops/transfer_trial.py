"""A trial of `hitherto doctor`: one short prompt, prefilled on one replica and decoded on another, per kind of pair.

Replicas of one role are of one kind if their engine, traits and KV transfer are the same: pairs of the same two kinds
fail alike, except for addresses and networks. Pairs that the gateway would not make are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import orjson

from gateway.ops.trial import Finding, Locked, Refused, Trial, new_prompt
from replicas.adopt import engine_ids
from replicas.engines.transfer import MeetingTransfer, with_first
from replicas.names import bracketed
from replicas.pairing import obstacles
from replicas.problems import Problem
from replicas.roles import BOTH, DECODERS, PREFILLERS

if TYPE_CHECKING:
    from replicas.engines.transfer import Transfer

PATH = "/v1/completions"
ASKED_SECONDS = 5.0  # for a prefiller to report its engines' ids


async def transfers(trials: Sequence[Trial]) -> AsyncIterator[Finding]:
    """Try one transfer from each kind of prefiller to each kind of decoder of one model, if there are roles."""
    if all(one.replica.role == BOTH for one in trials):
        return
    prefillers = [one for one in trials if one.replica.role in PREFILLERS]
    decoders = [one for one in trials if one.replica.role in DECODERS]
    tried: set[tuple[Any, ...]] = set()
    for first, second in product(prefillers, decoders):
        transfer, kinds = first.replica.transfer, (_kind(first), _kind(second))
        if first is second or kinds in tried or transfer is None or transfer is not second.replica.transfer:
            continue
        if obstacles(first.replica.traits, second.replica.traits, transfer):  # `roles` has said so
            continue
        tried.add(kinds)
        subject = f"transfer {first.id}"
        try:
            if isinstance(transfer, MeetingTransfer):
                yield await _at_once(first, second, transfer, subject)
            else:
                yield await (_relayed if transfer.header else _in_turn)(first, second, transfer, subject)
        except Locked:
            yield Finding(
                "warn",
                subject,
                "an API key is wanted, so no transfer could be tried",
                first.replica.dialect.remedies.models,
            )


def _kind(trial: Trial) -> tuple[Any, ...]:
    replica = trial.replica
    return replica.dialect.id, replica.traits, replica.moves_by, replica.role


def _body(trial: Trial) -> dict[str, Any]:
    return {"model": trial.model, "prompt": new_prompt(trial.block_size), "max_tokens": 4, "temperature": 0}


async def _in_turn(first: Trial, second: Trial, transfer: Transfer, subject: str) -> Finding:
    """Send the gateway's two legs, one after the other."""
    body = orjson.dumps(_body(first))
    leg = transfer.first_body(PATH, body)
    assert leg is not None
    try:
        parameters = transfer.parameters(orjson.dumps(await first.post(PATH, orjson.loads(leg))))
    except (Refused, ValueError) as error:
        return Finding("fail", subject, f"it did not compute a first leg: {error}", "the engine's own log says more")
    if not parameters:
        return Finding("fail", subject, f"it computed a prompt and kept nothing for another replica ({transfer.name})",
                       first.replica.dialect.remedies.transfer)  # fmt: skip
    try:
        await second.post(PATH, orjson.loads(transfer.second_body(body, parameters)))
    except Refused as error:
        at = transfer.fetched_from(parameters)
        where = f", which is to fetch the cache at {at}," if at else ""
        reach = f"{at} has to be reached from {second.id}: {first.replica.dialect.remedies.transfer}" if at else ""
        return Finding("fail", subject, f"{second.id}{where} did not answer the second leg: {error}",
                       f"see the log of {second.id}" + (f"; {reach}" if reach else ""))  # fmt: skip
    return await _fetches(first, second, transfer, subject, body)


async def _at_once(first: Trial, second: Trial, transfer: MeetingTransfer, subject: str) -> Finding:
    """Send the gateway's two legs at the same time; each waits for the other, so one fault shows on both sides."""
    problem = await engine_ids(first.session, first.replica, ASKED_SECONDS)
    meeting = first.replica.meeting
    if problem is not None or meeting is None:
        what = problem or Problem("nobody knows where it is met", first.replica.dialect.remedies.transfer)
        return Finding("fail", subject, what.what, what.remedy)
    body = orjson.dumps(_body(first))
    leg = transfer.first_body(PATH, body)
    assert leg is not None
    for_first, for_second = transfer.meet(meeting)
    bodies = with_first(leg, for_first), transfer.second_body(body, for_second)
    asked = [one.post(PATH, orjson.loads(raw)) for one, raw in zip((first, second), bodies, strict=True)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    failed = [one for one in answers if isinstance(one, BaseException)]
    said = "; ".join(str(one) or "an API key is wanted" for one in failed)
    if not failed:
        return Finding("ok", subject, f"{second.id} answered a prompt that was computed there ({transfer.name})")
    at = f"{bracketed(meeting.host)}:{meeting.port}"
    return Finding("fail", subject, f"{second.id} did not answer a prompt that was computed there: {said}",
                   f"see the logs of both; {at} has to be reached from {second.id}: {first.replica.dialect.remedies.transfer}")  # fmt: skip


async def _fetches(first: Trial, second: Trial, transfer: Transfer, subject: str, body: bytes) -> Finding:
    """Return a warning if the second replica may have computed the prompt again.

    An engine without a connector does that and answers all the same. Engines that can fetch can also keep, so a first
    leg sent to the second replica shows whether it has a connector.
    """
    done = Finding("ok", subject, f"{second.id} answered a prompt that was computed there ({transfer.name})")
    if not isinstance(transfer, type(second.replica.dialect.transfer)):
        return done
    leg = transfer.first_body(PATH, body)
    try:
        kept = leg and transfer.parameters(orjson.dumps(await second.post(PATH, orjson.loads(leg))))
    except (Refused, ValueError):
        return done
    if kept:
        return done
    return Finding("warn", subject, f"{second.id} answered, but keeps no cache for others itself: it may have computed the prompt again",
                   second.replica.dialect.remedies.transfer)  # fmt: skip


async def _relayed(first: Trial, second: Trial, transfer: Transfer, subject: str) -> Finding:
    """Send one request to the proxy before the decoder, which has the prompt computed itself."""
    body, replica = _body(second), first.replica
    header, at = transfer.header.decode(), f"{bracketed(replica.address or replica.host)}:{replica.port}"
    try:
        await second.post(PATH, body, {header: at})
    except (Refused, Locked) as error:
        what = str(error) or "an API key is wanted"
        return Finding("fail", subject, f"{second.id} did not have a prompt computed at {at}: {what}",
                       f"{at} has to be reached from {second.id}, and to be on its list of those that it may ask, if it has one")  # fmt: skip
    try:
        usage = (await first.post(PATH, body)).get("usage") or {}
    except Refused as error:
        return Finding("fail", subject, f"it does not answer: {error}", "the engine's own log says more")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        return Finding(
            "ok",
            subject,
            f"{second.id} answered; whether the prompt was computed here nobody tells, without cached tokens in usage",
        )
    if cached:
        return Finding("ok", subject, f"{second.id} answered a prompt that was computed there ({transfer.name})")
    return Finding("fail", subject, f"{second.id} answered, and the prompt was never computed at {at}: it does not read {header}",
                   f"give the URL of {transfer.name} in place of its engine's, or leave transfer= out")  # fmt: skip
