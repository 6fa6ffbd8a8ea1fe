"""How tests run `hitherto doctor`, and the pages of an engine and of a gateway that it looks at."""

import asyncio
import functools
import json
import re
import urllib.request

import pytest
from redis.exceptions import ResponseError

from cachemap import CacheMap
from cachemap.cluster import SharedMap
from cachemap.cluster.connect import Trouble, parse
from cachemap.cluster.shared import LEASES
from gateway import cli
from gateway.ops import doctor
from gateway.ops.findings import Finding
from gateway.ops.gateway_checks import Gateway
from gateway.ops.replica_checks import Engine
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens.agreement import Differences
from gateway.settings import Settings
from replicas.adopt import Facts
from replicas.replica import parse_url

from ...redis_server import free_port as free_port


def told_by(url: str) -> dict:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def redis_trouble(answer: str) -> str:
    """What a gateway says of the shared map once Redis gives this answer to every look at its leases."""
    shared = SharedMap(parse("redis://127.0.0.1:9"), "prod", CacheMap(1 << 20))
    shared.in_trouble(LEASES, 0, Trouble.of(ResponseError(answer)))
    return shared.trouble


_read = functools.cache(Pipeline)


def once_read(*given, **more) -> Pipeline:
    """Reading a tokenizer takes a second; the same one is read once for all tests, without what others found of it."""
    pipeline = _read(*given, **more)
    pipeline.differ(Differences())
    return pipeline


async def checked(fact, *names: str) -> list[Finding]:
    """What the checks of these names, or all checks, find about one fact."""
    checks = [one for one in doctor.CHECKS if isinstance(fact, one.needs) and (not names or one.name in names)]
    return [finding for check in checks async for finding in check.findings(fact)]


def found_in(fact, *names: str) -> list[Finding]:
    return asyncio.run(checked(fact, *names))


def an_engine(url: str, facts: Facts | None = None, status: dict | None = None, **settings) -> Engine:
    """An engine that reports these facts, and that a running gateway with this status may know."""
    known = Gateway(None, status=status or {}).entries(url)
    return Engine(Settings(**settings), parse_url(url), known, facts or Facts())


def doctor_lines(capsys, *flags: str) -> tuple[int, str]:
    code = cli.main(["doctor", *flags])
    return code, capsys.readouterr().out


def examine(capsys, *flags: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """(exit code, subject without the replica's name -> (level, text and remedy))."""
    found: dict[str, tuple[str, str]] = {}
    line = doctor.line

    def noted(finding: Finding) -> str:
        found[finding.subject.split(" 127.")[0]] = (finding.level, f"{finding.text} {finding.remedy}".strip())
        return line(finding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "line", noted)
        code = cli.main(["doctor", *flags])
    out = capsys.readouterr().out
    broken = len(re.findall(r"^fail ", out, re.M))
    assert f": {broken} broken, " in out if broken else "0 broken" in out or "all is well" in out
    return code, found


METRICS = """vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="100"} 1.0
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.0
vllm:prefix_cache_queries_total{engine="0"} 0.0
vllm:prefix_cache_hits_total{engine="0"} 0.0
vllm:prompt_tokens_total{engine="0"} 0.0
vllm:generation_tokens_total{engine="0"} 0.0
"""


ENGINE = {
    "/health": "",
    "/v1/models": {"data": [{"id": "sim"}, {"id": "sql", "parent": "sim"}]},
    "/version": {"version": "9"},
    "/metrics": METRICS,
    "/kv_event_sources": {},
}


COMPLETION = {"usage": {"prompt_tokens": 60, "prompt_tokens_details": {"cached_tokens": 48}}}


TRIED = {**ENGINE, "/v1/completions": COMPLETION}

BAD_KEYS = '- {name: team a!, sha256: "' + 64 * "0" + '"}\n'


def status(**changes) -> dict:
    replica = {"id": "a:1", "url": "http://a:1", "events": "live"}
    return {
        "ready": True,
        "why_not": None,
        "policy": "least_time",
        "totals": {"prompts": {"exact": 99, "load": 1}},
        "replicas": [replica],
        **changes,
    }
