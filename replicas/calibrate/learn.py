"""What an engine tells of itself before it is measured: model, version, machine, limits; and whether it is idle.

An engine tells its cache in /metrics and, where the operator allows it, its scheduler's limits. What it does
not tell is seen later, or vLLM's default is assumed and said to be.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from replicas.adopt import probe
from replicas.ask import get
from replicas.metrics import parse
from replicas.served import base_names

from .client import CalibrationError, Client
from .plan import Limits

PATIENCE = 5.0  # s for an answer without generation
INFO_PATIENCE = 60.0  # s: /server_info looks at the whole machine
ASSUMED = {
    "max_model_len": 8192,
    "block_size": 16,
    "num_blocks": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}


@dataclass(frozen=True, slots=True)
class Known:
    model: str
    engine: str
    version: str
    machine: str
    limits: Limits


async def learn(client: Client, model: str | None) -> Known:
    """Sets `client.model` and `client.dialect`. CalibrationError when there is no engine to measure."""
    facts = await probe(client.url, client.session, PATIENCE)
    if not facts.alive:
        raise CalibrationError(f"no engine answers at {client.url}: {facts.error}")
    if not facts.serving:
        raise CalibrationError(f"{client.url} is not ready: {facts.error}")
    served = base_names(facts.models)
    if model is None and not served:
        raise CalibrationError(
            "the engine does not list its models (an API key? set OPENAI_API_KEY): give --model NAME"
        )
    if model is not None and facts.models and model not in facts.models:
        raise CalibrationError(f"the engine has no model {model!r}; it serves {', '.join(facts.models)}")
    client.model, client.dialect = model or served[0], facts.dialect
    info = (await get(client.session, client.url + client.dialect.limits_path, INFO_PATIENCE)).json()
    scheduler = client.dialect.scheduler_limits(info)
    told = {"max_model_len": facts.max_model_len, "block_size": facts.block_size, "num_blocks": facts.num_blocks,
            **{name: scheduler.get(name) for name in ("max_num_seqs", "max_num_batched_tokens")}}  # fmt: skip
    told = {name: value for name, value in told.items() if type(value) is int and value > 0}
    sources = {name: "reported by the engine" if name in told else "assumed" for name in ASSUMED}
    limits = Limits(**{**ASSUMED, **told}, told=sources)
    return Known(
        client.model,
        facts.dialect.name,
        facts.version or "version unknown",
        _machine(client.url, _mapping(info.get("system_env"))),
        limits,
    )


async def at_work(client: Client) -> int | None:
    """Requests in the engine, running or waiting; None when it does not tell."""
    answer = await get(client.session, client.url + "/metrics", PATIENCE)
    scrape = parse(answer.body, 0.0, client.dialect.metrics) if answer.status == 200 else None
    return None if scrape is None or scrape.running is None else scrape.running + (scrape.waiting or 0)


async def looked_up(client: Client) -> int | None:
    """Prompt tokens that the engine has looked up in its cache since it began: everybody's."""
    answer = await get(client.session, client.url + "/metrics", PATIENCE)
    return parse(answer.body, 0.0, client.dialect.metrics).prefix_queries if answer.status == 200 else None


def _mapping(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _machine(url: str, env: dict) -> str:
    """GPUs, else the CPU, by the engine's own word; else this machine's CPU if the engine is on it."""
    gpus = env.get("nvidia_gpu_models")
    if isinstance(gpus, str) and gpus.strip():
        return " | ".join(line.strip() for line in gpus.strip().splitlines())
    for line in str(env.get("cpu_info", "")).splitlines():
        if line.strip().startswith("Model name:"):
            return line.partition(":")[2].strip()
    if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        return _own_cpu()
    return "machine unknown: the engine is remote"


def _own_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} CPUs" if names else platform.machine()
