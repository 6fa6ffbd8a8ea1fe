"""Pairs of replicas that pass on KV caches in each of three ways, as scripts for tests of requests in two legs."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from ..http.talk import read_request
from .replies import ANSWER, ENDS, EVENT, LONG, SSE_HEAD, chunk, post, reply
from .stack import stack

PARAMETERS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e-1",
    "remote_request_id": "r-1", "remote_host": "10.0.0.1", "remote_port": 5600, "more": {"in": [1.5, None]},
}  # fmt: skip
CHOICES = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}]}
USED = {"prompt_tokens": 95, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
COMPUTED = json.dumps(CHOICES | {"usage": USED}, separators=(",", ":")).encode()
HANDED = json.dumps(CHOICES | {"usage": USED, "kv_transfer_params": PARAMETERS}, separators=(",", ":")).encode()
KEEPS_NOTHING = json.dumps(CHOICES | {"usage": USED, "kv_transfer_params": None}).encode()
STREAMED = LONG.replace(b"{", b'{"stream": true, ', 1)
STREAM = SSE_HEAD + chunk(EVENT) + chunk(EVENT) + ENDS
BEGUN = SSE_HEAD + chunk(EVENT)
REFUSED = b'{"error":{"message":"no","type":"BadRequestError","code":400}}'
HEADER = b"x-prefiller-host-port"


class Side:
    """A replica: its n-th request is dealt with by the n-th act, the others by the last one. `left`: how many requests
    the gateway did not want any more, by closing the connection."""

    def __init__(self, *acts):
        self.acts, self.bodies, self.heads, self.left = acts, [], [], 0

    async def __call__(self, reader, writer):
        while True:
            head, body = await read_request(reader)
            self.heads.append(head)
            self.bodies.append(json.loads(body))
            act = self.acts[min(len(self.bodies), len(self.acts)) - 1]
            if await act(self, reader, writer) is False:
                return

    @property
    def legs(self):
        """Which leg each request was: prefill, decode or whole."""
        return ["decode" if named(head) else leg_of(body) for head, body in zip(self.heads, self.bodies, strict=True)]

    async def gone(self, reader):
        with suppress(ConnectionError):
            assert await reader.read() == b""
        self.left += 1
        return False


def says(*steps, then=None):
    """An act that writes bytes and waits for events. `then`: "close" the connection, or "wait" until the gateway does;
    else the next request is read."""

    async def act(side, reader, writer):
        for step in steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                writer.write(step)
                await writer.drain()
        return await side.gone(reader) if then == "wait" else then != "close"

    return act


waits, closes = says(then="wait"), says(then="close")
answers, streams, begins = says(reply(ANSWER)), says(STREAM), says(BEGUN, then="wait")


async def untouched(reader, writer):
    raise AssertionError("the gateway sends a prefiller nothing")


class Way(NamedTuple):
    """How caches are passed on. `at_once`: both legs are sent at once. `computed`: what a prefiller answers; None: the
    request goes once, to the decoder, and names the prefiller, to which the gateway sends nothing."""

    moves_by: str
    at_once: bool
    computed: bytes | None

    def computes(self):
        return says(reply(self.computed or b""))

    def prefiller(self, *acts):
        return untouched if self.computed is None else Side(*(acts or [self.computes()]))

    def failing(self, act):
        """A decoder's acts where the first leg fails: what is sent at once waits for that."""
        return Side(*[waits] * self.at_once, act)


NIXL, MOONCAKE, SIDECAR = Way("nixl", False, HANDED), Way("mooncake", True, COMPUTED), Way("llm-d", False, None)
WAYS = (NIXL, MOONCAKE, SIDECAR)


@asynccontextmanager
async def disaggregated(*scripts, way=NIXL, roles=("prefill", "decode"), **options):
    """A stack whose replicas have these roles and pass caches on in this way."""
    async with stack(*scripts, **options) as s:
        for number, backend in enumerate(s.proxy.backends.values()):
            backend.replica.moves_by, backend.replica.bootstrap = way.moves_by, 9000 + number
            backend.replica.engine_ids = {0: f"engine-{number}"}
            if way is SIDECAR:
                backend.follow_incarnation()
        give_roles(s, *roles)
        yield s


def give_roles(s, *roles):
    for backend, role in zip(list(s.proxy.backends.values()), roles, strict=True):
        backend.replica.role = role
    s.proxy.changed()


def leg_of(body):
    told = body.get("kv_transfer_params") or {}
    return "prefill" if told.get("do_remote_decode") else "decode" if told.get("do_remote_prefill") else "whole"


def named(head):
    """The prefiller that a request's head names."""
    found = [line.partition(b": ")[2].decode() for line in head.split(b"\r\n") if line.lower().startswith(HEADER)]
    assert len(found) <= 1
    return found[0] if found else None


def room_of(body):
    """By what the two legs of a request that are sent at once find each other."""
    return (body.get("kv_transfer_params") or {}).get("transfer_id")


async def asks(s, body=LONG, **more):
    return await s.ask(post(body, **more))


def sent(s, leg):
    return any(a.leg is leg and a.sent_at for x in s.proxy.exchanges for a in x.attempts)
