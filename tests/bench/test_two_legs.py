"""The mock engine in front of which NIXL's two legs are measured: what a gateway makes of its answers."""

import asyncio
import sys

import orjson

from bench import instant_engine
from replicas.engines.vllm.transfer import NIXL

BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'


async def ask(url, body):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" in head:
        told = await reader.readuntil(b"0\r\n\r\n")
    else:
        told = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0]))
    writer.close()
    await writer.wait_closed()
    return told


async def test_its_first_leg_keeps_the_prompt_and_its_second_leg_is_the_answer():
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.instant_engine", stdout=asyncio.subprocess.PIPE
    )
    try:
        url = (await engine.stdout.readline()).decode().strip()
        told = await ask(url, NIXL.first_body("/v1/chat/completions", BODY))
        parameters = NIXL.parameters(told)
        assert orjson.loads(b"{%b}" % parameters)["kv_transfer_params"] == instant_engine.KEPT
        assert orjson.loads(told)["usage"]["completion_tokens"] == 1
        second = NIXL.second_body(BODY, parameters)
        assert (await ask(url, second)).count(b'"delta"') == instant_engine.CHUNKS
        whole = orjson.loads(await ask(url, second.replace(b'"stream":true', b'"stream":false')))
        assert "kv_transfer_params" not in whole
        assert len(whole["choices"][0]["message"]["content"].split()) == instant_engine.CHUNKS
    finally:
        engine.kill()
        await engine.wait()
