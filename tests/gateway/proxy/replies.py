"""Literal requests, and replicas that answer them by a script."""

import asyncio
import json

from ..http.talk import read_request

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


def post(body=BODY, path=b"/v1/chat/completions", extra=b""):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    return (
        b"POST %b HTTP/1.1\r\nHost: client.example\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
        % (path, extra, len(body), body)
    )


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


ENDS = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


# Of the shape that an engine's answer has: anything else is taken for another server's.
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"text":"hi","finish_reason":"stop"}]}'


def reply(body=ANSWER, status=b"200 OK", headers=b""):
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status,
        len(body),
        headers,
        body,
    )


def answers(body=ANSWER, status=b"200 OK", headers=b"", seen=None, close_after=False):
    """A replica that gives this answer to every request."""

    async def script(reader, writer):
        while True:
            request = await read_request(reader)
            if seen is not None:
                seen.append(request)
            writer.write(reply(body, status, headers))
            if close_after:
                return

    return script


def streams(*pieces, end=ENDS, pause=None, seen=None):
    """A replica that streams these pieces and `end`, with `pause()` after each piece. Without an `end`, it closes."""

    async def script(reader, writer):
        while True:
            request = await read_request(reader)
            if seen is not None:
                seen.append(request)
            writer.write(SSE_HEAD)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if pause:
                    await pause()
            if end is None:
                return
            writer.write(end)

    return script


NEXT = object()


def says(*steps, then_hangs=True):
    """A replica on whose connection a request is read, and then bytes are written, events waited for, further requests
    read (NEXT), and functions called."""

    async def script(reader, writer):
        await read_request(reader)
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step is NEXT:
                await read_request(reader)
            else:
                step()
        if then_hangs:
            await reader.read()

    return script


async def silent(reader, writer):
    await reader.read()


LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi " * 100}]}).encode()


USAGE = b'{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}'


CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKS = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"model": "m", "prompt": "hello"},
    RESPONSES: {"model": "m", "input": "hello"},
    MESSAGES: {"model": "m", "max_tokens": 900, "messages": [{"role": "user", "content": "hello"}]},
}
