"""The engine as a process: starts, serves, ends."""

import asyncio
import json
import re
import socket
import sys

import pytest

from replicas.simulated import cli


async def start(*flags: str):
    """-> (process, "host:port", its start-up line); fails with its words if it does not come up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "replicas.simulated", "--port", "0", *flags, stderr=asyncio.subprocess.PIPE
    )
    said = ""
    async with asyncio.timeout(60):
        while line := (await process.stderr.readline()).decode():
            said += line
            if found := re.search(r"on http://(\S+?),", line):
                return process, found[1], line
    await process.wait()
    raise AssertionError(f"no engine came up:\n{said}")


async def ask(address: str, path: str, body: dict | None = None) -> dict | bytes:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode() if body is not None else b""
    writer.write(
        b"%b %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (b"GET" if body is None else b"POST", path.encode(), len(data), data)
    )
    raw = await reader.read()
    writer.close()
    return json.loads(raw.partition(b"\r\n\r\n")[2]) if raw else raw


async def test_a_host_that_does_not_resolve_is_named_as_such():
    with pytest.raises(AssertionError, match=r"no\.such\.invalid does not resolve: give an address of this machine"):
        await start("--host", "no.such.invalid")


async def test_it_serves_until_told_to_stop_and_closes_idle_connections():
    process, address, line = await start(
        "--served-model-name", "mine", "--speedup", "50", "--num-blocks", "640", "--block-size", "32", "--lora", "extra"
    )
    try:
        assert "mine (gpu-8b, 640 blocks of 32)" in line
        cards = (await ask(address, "/v1/models"))["data"]
        assert [card["id"] for card in cards] == ["mine", "extra"] and cards[0]["max_model_len"] == 639 * 32
        answer = await ask(address, "/v1/completions", {"model": "extra", "prompt": "Once", "max_tokens": 3})
        assert answer["usage"]["completion_tokens"] == 3
        assert (await ask(address, "/kv_event_sources"))["0"]["topic"] == ""
        # a head as large as a gateway lets through, which has its own words for a larger one
        assert [one["id"] for one in (await ask(address, f"/v1/models?{'q' * 60_000}"))["data"]] == ["mine", "extra"]
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
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
        (["--block-size", "0"], "--block-size: '0' is not a whole number above zero"),
        (["--num-blocks", "0"], "--num-blocks: '0' is not a whole number above zero"),
        (["--chunk-blocks", "0"], "--chunk-blocks: '0' is not a whole number above zero"),
        (["--cpu-blocks", "-1"], "cpu_blocks must be at least 0"),
    ],
)
async def test_flags_that_cannot_be_end_it_with_2(flags, about):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "replicas.simulated", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2 and about in said.decode() and "Traceback" not in said.decode()


@pytest.mark.parametrize("flag", ["--port", "--events-port", "--replay-port"])
async def test_a_port_in_use_ends_it_with_2_and_names_the_flag_to_change(flag):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "replicas.simulated", "--port", "0", flag, str(port), stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
    assert process.returncode == 2 and b"Traceback" not in said
    assert f"hitherto replica: cannot listen on 127.0.0.1:{port}: " in said.decode()
    assert said.decode().endswith(f"Stop what holds the port, or give another with {flag} (and --host)\n")


async def test_a_folder_that_holds_no_usable_tokenizer_ends_it_with_2_and_its_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": "nonsense"}')
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "replicas.simulated",
        "--port",
        "0",
        "--model",
        str(tmp_path),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(20):
        _, said = await process.communicate()
    assert (
        process.returncode == 2
        and f"hitherto replica: --model {tmp_path}: ".encode() in said
        and b"Traceback" not in said
    )


@pytest.mark.parametrize("flags", ["--port --events-port", "--events-port --replay-port"])
def test_two_servers_of_one_engine_cannot_share_a_port(capsys, unused_tcp_port, flags):
    one, other = flags.split()
    assert cli.main([one, str(unused_tcp_port), other, str(unused_tcp_port)]) == 2
    assert capsys.readouterr().err == f"hitherto replica: {one} and {other} cannot share {unused_tcp_port}\n"
