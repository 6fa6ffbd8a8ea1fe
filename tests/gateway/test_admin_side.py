"""The admin side of a real gateway that other machines can reach, and its clients: commands, scrapes, operators."""

import asyncio
import re

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from gateway import cli

from .running import running

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a-token-for-operators-0123456789"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(start_engine, tmp_path_factory):
    """Behind a token, on every address; its engine is in development mode, as simulated ones always are."""
    file = tmp_path_factory.mktemp("secrets") / "admin-token"
    file.write_text(TOKEN + "\n")
    flags = ["--admin-host", "0.0.0.0", "--admin-token", f"@{file}", "--admin-allow-host", "gateway", "--model", "sim"]
    async with running("--replica-url", start_engine().wait().url, *flags) as process:
        process.admin.headers.update(BEARER)
        process.secret = f"@{file}"
        await process.ready(1)
        yield process


def command(gateway, *words: str):
    """A command on the gateway's machine, with the gateway's settings."""
    ports = ["--admin-port", str(gateway.admin.base_url.port), "--port", str(gateway.client.base_url.port)]
    return asyncio.to_thread(cli.main, [*words, "--admin-host", "0.0.0.0", *ports, "--model", "sim"])


async def test_prometheus_gets_the_metrics_by_its_credentials_file_and_the_service_name(gateway):
    async with httpx.AsyncClient(base_url=gateway.admin.base_url, headers={"Host": "gateway:8081"}) as prometheus:
        assert (await prometheus.get("/metrics")).status_code == 401
        page = await prometheus.get("/metrics", headers=BEARER)
    names = {family.name for family in text_string_to_metric_families(page.text)}
    assert page.status_code == 200 and {"hitherto_requests", "hitherto_replica_state"} <= names


async def test_doctor_and_explain_carry_the_token(gateway, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = tmp_path / "body.json"
    body.write_text('{"model": "sim", "messages": [{"role": "user", "content": "hi"}]}')
    secret = ("--admin-token", gateway.secret)
    assert await command(gateway, "explain", str(body), *secret) == 0
    assert ": the request costs " in capsys.readouterr().out
    assert await command(gateway, "explain", str(body), "--admin", str(gateway.admin.base_url), *secret) == 0
    capsys.readouterr()
    await command(gateway, "doctor", *secret)
    assert re.search(r"^ok +gateway +runs, ready", capsys.readouterr().out, re.M)


async def test_without_the_token_doctor_and_explain_say_what_is_missing(gateway, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "body.json").write_text("{}")
    monkeypatch.setenv("HITHERTO_ADMIN_TOKEN", "another-token-than-the-gateway-has")
    assert await command(gateway, "explain", "body.json") == 2
    told = capsys.readouterr()
    assert "refuses: this is not the admin token" in told.err and "no gateway" not in told.err
    assert await command(gateway, "doctor") == 1
    assert re.search(
        r"^fail +gateway +one runs, and refuses the doctor: the admin side at \S+ refuses: this is not the admin token.*\n"
        r" +-> run the doctor with the --admin-token",
        capsys.readouterr().out,
        re.M,
    )


async def test_an_operators_verbs_reach_one_engine_and_only_from_here(gateway):
    (replica,) = (await gateway.status())["replicas"]
    engine = f"/replicas/{replica['id']}/engine"
    assert (await gateway.client.post("/reset_prefix_cache")).status_code == 404
    for _ in range(2):
        warm = await gateway.chat([{"role": "user", "content": "once upon a time " * 50}])
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    answer = await gateway.admin.post(engine + "/reset_prefix_cache")
    assert answer.status_code == 200, answer.text
    cold = await gateway.chat([{"role": "user", "content": "once upon a time " * 50}])
    assert cold.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    loaded = await gateway.admin.post(engine + "/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/sql"})
    assert loaded.status_code == 200, loaded.text
    assert (await gateway.chat([{"role": "user", "content": "hi"}], model="sql")).status_code == 200
    assert "vllm:num_requests_running{" in (await gateway.admin.get(engine + "/metrics")).text
    assert (await gateway.admin.get(engine + "/nothing?a=%20b")).status_code == 404
    assert (await gateway.admin.post("/replicas/nobody:1/engine/sleep")).json()["error"]["code"] == "unknown_replica"
    nobody = {"Authorization": "none"}
    assert (await gateway.admin.post(engine + "/reset_prefix_cache", headers=nobody)).status_code == 401
