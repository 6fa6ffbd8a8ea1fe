"""Facts that an engine reports before it is measured: model, version, machine, limits, and whether it is idle.

Cache figures are in /metrics; the scheduler's limits are available where the operator exposes them. Limits that are not
reported are measured later, or a common default is assumed and marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from loadgen.report.summary import machine
from replicas.access import Access
from replicas.metrics import parse
from replicas.served import base_names

from .ask import CalibrationError, Client
from .plan import Limits

PATIENCE = 5.0  # seconds for a response without generation
ASSUMED = {
    "max_model_len": 8192,
    "block_size": 16,
    "num_blocks": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}


@dataclass(frozen=True, slots=True)
class Known:
    """The facts about an engine that go into its profile."""

    model: str
    engine: str
    version: str
    machine: str
    limits: Limits


async def learn(client: Client, model: str | None) -> Known:
    """Return what the engine reports, and set `client.model` and `client.dialect`.

    Raises CalibrationError when no engine can be measured.
    """
    way = Access(client.base_url, urlsplit(client.base_url).hostname or "", headers=client.own_headers)
    try:
        facts = await way.find(PATIENCE)
    finally:
        await way.close()
    if not facts.alive:
        raise CalibrationError(f"no engine answers at {client.base_url}: {facts.error}")
    if not facts.serving:
        raise CalibrationError(f"{client.base_url} is not ready: {facts.error}")
    served = base_names(facts.models)
    if model is None and not served:
        raise CalibrationError(
            "the engine does not list its models (an API key? set OPENAI_API_KEY): give --model NAME"
        )
    if model is not None and facts.models and model not in facts.models:
        raise CalibrationError(f"the engine has no model {model!r}; it serves {', '.join(facts.models)}")
    client.model, client.dialect = model or served[0], facts.dialect
    info = await _info(client)
    scheduler = client.dialect.scheduler_limits(info)
    told = {"max_model_len": facts.max_model_len, "block_size": facts.block_size, "num_blocks": facts.num_blocks,
            **{name: scheduler.get(name) for name in ("max_num_seqs", "max_num_batched_tokens")}}  # fmt: skip
    told = {name: value for name, value in told.items() if type(value) is int and value > 0}
    sources = {name: "reported by the engine" if name in told else "assumed" for name in ASSUMED}
    limits = Limits(**{**ASSUMED, **told}, told=sources)
    return Known(client.model, facts.dialect.name, facts.version or "version unknown", _machine(client, info), limits)


async def _info(client: Client) -> dict[str, object]:
    """Return the engine's settings and machine as far as the operator exposes them."""
    _, body, _ = await client.get(client.dialect.limits_path)
    try:
        info = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return info if isinstance(info, dict) else {}


async def at_work(client: Client) -> int | None:
    """Return the number of requests running or waiting in the engine; None if it does not report it."""
    status, page, _ = await client.get("/metrics")
    scrape = parse(page, 0.0, client.dialect.metrics) if status == 200 else None
    return None if scrape is None or scrape.running is None else scrape.running + (scrape.waiting or 0)


async def looked_up(client: Client) -> int | None:
    """Return the prompt tokens that the engine has looked up in its cache since it began, for all clients."""
    status, page, _ = await client.get("/metrics")
    return parse(page, 0.0, client.dialect.metrics).prefix_queries if status == 200 else None


def _machine(client: Client, info: dict[str, object]) -> str:
    """Return the engine's GPUs or CPU as it reports them, or this machine for a local engine."""
    env = info.get("system_env")
    env = env if isinstance(env, dict) else {}
    gpus = env.get("nvidia_gpu_models")
    if isinstance(gpus, str) and gpus.strip():
        return " | ".join(line.strip() for line in gpus.strip().splitlines())
    for line in str(env.get("cpu_info", "")).splitlines():
        if line.strip().startswith("Model name:"):
            return line.partition(":")[2].strip()
    if urlsplit(client.base_url).hostname in ("127.0.0.1", "localhost", "::1"):
        return machine()
    return "machine unknown: the engine is remote"
