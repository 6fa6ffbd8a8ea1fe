"""LiteLLM with `hosted_vllm/` in front of the gateway: its library, and its proxy with OpenAI's client before it."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # what it would fetch from outside

import litellm
import openai
import pytest
import yaml

from .conftest import ROOT

HELLO = [{"role": "user", "content": "Which module reads CSV?"}]
LONG = [{"role": "user", "content": "Count these words. " * 200}]
MASTER = "sk-litellm-0123456789"


@pytest.fixture
def asked(gateway) -> dict:
    return {"model": "hosted_vllm/sim", "api_base": gateway.url + "/v1", "max_tokens": 8, "num_retries": 0}


def test_chat_and_stream(asked):
    whole = litellm.completion(**asked, messages=HELLO).choices[0].message.content
    chunks = litellm.completion(**asked, messages=HELLO, stream=True)
    assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def test_async(asked):
    assert (await litellm.acompletion(**asked, messages=HELLO)).usage.completion_tokens <= 8


def test_cached_tokens_arrive(asked):
    for _ in range(2):
        usage = litellm.completion(**asked, messages=LONG).usage
    assert usage.prompt_tokens_details.cached_tokens > 500


def test_embedding(asked):
    asked.pop("max_tokens")
    assert len(litellm.embedding(**asked, input=["one"]).data[0]["embedding"]) == 64


def test_errors_are_litellms_own(asked):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "hosted_vllm/another"}, messages=HELLO)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "max_tokens": 10_000_000}, messages=HELLO)


# ---- its proxy


class Listener(BaseHTTPRequestHandler):
    """In place of a gateway: notes what it is sent."""

    headers_seen: ClassVar[dict[str, str]] = {}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        Listener.headers_seen = {name.lower(): value for name, value in self.headers.items()}
        self.send_response(400)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def listener():
    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def proxy(shared_gateway, listener, tmp_path_factory):
    """`litellm --config` with the configuration of docs/clients.md, on a free port; yields its address."""
    folder = tmp_path_factory.mktemp("litellm")
    shown = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/clients.md").read_text(), re.S)[1]
    shown = shown.replace("http://GATEWAY:8080", shared_gateway.url).replace("Qwen/Qwen3-8B", "sim")
    config = yaml.safe_load(shown)
    config["general_settings"]["master_key"] = MASTER
    seen = {"model": "hosted_vllm/sim", "api_base": listener}
    config["model_list"].append({"model_name": "listener", "litellm_params": seen})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("litellm"), "--config", folder / "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
            stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 90
    try:
        while True:
            try:
                urllib.request.urlopen(url + "/health/liveliness", timeout=5).close()
                break
            except OSError:
                said = (folder / "log").read_text()
                assert process.poll() is None and time.monotonic() < end, said[-4000:]
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def client(proxy):
    with openai.OpenAI(base_url=proxy + "/v1", api_key=MASTER, max_retries=0, timeout=60) as client:
        yield client


def test_through_its_proxy(client, gateway):
    before = gateway.counted("hitherto_requests_total", status="2xx")
    whole = client.chat.completions.create(model="qwen", messages=HELLO, max_tokens=8).choices[0].message.content
    chunks = client.chat.completions.create(model="qwen", messages=HELLO, max_tokens=8, stream=True)
    assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert gateway.counted("hitherto_requests_total", status="2xx") == before + 2


def test_conversations_find_their_cache_behind_its_proxy(client):
    for _ in range(2):
        usage = client.chat.completions.create(model="qwen", messages=LONG, max_tokens=4).usage
    assert usage.prompt_tokens_details.cached_tokens > 500


def test_an_error_behind_its_proxy(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="qwen", messages=HELLO, max_tokens=10_000_000)
    assert re.search("max_model_len", str(caught.value))


def test_it_passes_headers_on(client):
    with pytest.raises(openai.APIError):
        client.chat.completions.create(model="listener", messages=HELLO, extra_headers={"x-hitherto-slo": "ttft=2s"})
    assert Listener.headers_seen["x-hitherto-slo"] == "ttft=2s"
