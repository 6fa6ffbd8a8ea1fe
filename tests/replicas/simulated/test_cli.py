"""The engine as a process: starts, serves, ends."""

import asyncio
import re
import socket
import subprocess
import sys

import aiohttp
import pytest

WHOLE, PORTS = ("block-size", "num-blocks", "chunk-blocks"), ("--port", "--events-port", "--replay-port")


async def test_it_serves_until_told_to_stop_and_closes_idle_connections():
    flags = "-m replicas.simulated --port 0 --served-model-name mine --speedup 50 --num-blocks 640 --block-size 32 --lora extra".split()
    process = await asyncio.create_subprocess_exec(sys.executable, *flags, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            line = (await process.stderr.readline()).decode()
        assert "mine (gpu-8b, 640 blocks of 32)" in line
        port = int(re.search(r"on http://127.0.0.1:(\d+),", line)[1])
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:

            async def ask(path: str, **body) -> dict:
                async with client.request("POST" if body else "GET", path, json=body or None) as response:
                    return await response.json()

            cards = (await ask("/v1/models"))["data"]
            assert [card["id"] for card in cards] == ["mine", "extra"] and cards[0]["max_model_len"] == 639 * 32
            answer = await ask("/v1/completions", model="extra", prompt="Once", max_tokens=3)
            assert answer["usage"]["completion_tokens"] == 3
            assert (await ask("/kv_event_sources"))["0"]["topic"] == ""
            # a head as large as a gateway lets through, which has its own words for a larger one
            assert (await ask(f"/v1/models?{'q' * 60_000}"))["data"] == cards
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        assert asyncio.get_running_loop().time() - begun > 3
        writer.close()
        process.terminate()
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    "flags, about",
    [
        (["--profile", "nothing"], "cpu-tiny, gpu-8b"),
        (["--num-blocks", "1"], "num_blocks must be at least 2"),
        (["--model", "/nowhere"], "no tokenizer.json"),
        (["--speedup", "-1"], "--speedup: -1 is not above zero"),
        *((["--" + name, "0"], f"--{name}: '0' is not a whole number above zero") for name in WHOLE),
        (["--cpu-blocks", "-1"], "cpu_blocks must be at least 0"),
        (["--host", "no.such.invalid"], "no.such.invalid does not resolve: give an address of this machine"),
        (["--model", "FOLDER"], "hitherto replica: --model FOLDER: "),
        *(
            ([name, "PORT"], f"hitherto replica: cannot listen on 127.0.0.1:PORT: .*another with {name} ")
            for name in PORTS
        ),
    ],
)
def test_flags_that_cannot_be_end_it_with_2(tmp_path, flags, about):
    (tmp_path / "tokenizer.json").write_text('{"model": "nonsense"}')
    with socket.create_server(("127.0.0.1", 0)) as holder:
        known = {"FOLDER": str(tmp_path), "PORT": str(holder.getsockname()[1])}
        for name, value in known.items():
            flags, about = [value if flag == name else flag for flag in flags], about.replace(name, value)
        command = [sys.executable, "-m", "replicas.simulated", "--port", "0", *flags]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 2 and re.search(about, ended.stderr, re.DOTALL) and "Traceback" not in ended.stderr
