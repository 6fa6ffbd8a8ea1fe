"""An engine that answers at once, so that what a gateway takes is measured, for `bench.datapath` and `bench.two_legs`.

It computes nothing and moves nothing, and everything it sends is made beforehand. A request with `do_remote_decode`
gets one token and the parameters that vLLM's NIXL connector tells of BLOCKS blocks of 16 tokens, what the 8 kB of a
plain chat have; every other one 64 tokens, in one piece or as events 2 ms apart. It does not count prompts: a count
that differs from the gateway's would be a reason to doubt how its prompts are made.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

BLOCKS, CHUNKS, SPACING = 125, 64, 0.002
KEPT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[*range(BLOCKS)]],
    "remote_engine_id": "9c1f2f8e-0000-4000-8000-000000000001",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def reply(told: dict[str, Any]) -> bytes:
    body = orjson.dumps(told)
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chat(text: str, tokens: int, reason: str, **more: object) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    usage = {"completion_tokens": tokens} if more else None
    common = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return reply(common | {"choices": [choice], "usage": usage} | more)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


FIRST_LEG = chat("hello", 1, "length", kv_transfer_params=KEPT)
WHOLE = chat("hello " * CHUNKS, CHUNKS, "stop")
BEGIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DELTA = chunk(
    b"data: %b\n\n"
    % orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
        }
    )
)
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
MODELS = reply(
    {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 131072}]}
)


class Engine(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport, self.received = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.received[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r", 1)[0]) if at >= 0 else 0
            if len(self.received) < end + 4 + length:
                return
            body = bytes(self.received[end + 4 : end + 4 + length])
            del self.received[: end + 4 + length]
            self.answer(head.split(b" ", 2)[1], body)

    def answer(self, path: bytes, body: bytes) -> None:
        if not path.endswith(b"completions"):
            self.transport.write(MODELS if path == b"/v1/models" else reply({}))
        elif b'"do_remote_decode":true' in body:
            self.transport.write(FIRST_LEG)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self.streaming = asyncio.get_running_loop().create_task(self.stream())
        else:
            self.transport.write(WHOLE)

    async def stream(self) -> None:
        self.transport.write(BEGIN)
        for _ in range(CHUNKS):
            if self.transport.is_closing():
                return
            self.transport.write(DELTA)
            await asyncio.sleep(SPACING)
        self.transport.write(END)


async def serve() -> None:
    """Print the URL, and answer until killed."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
