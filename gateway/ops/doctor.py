"""The command `hitherto doctor`: one line for each thing that can be wrong, with what to do about it.

    ok    tokenizer        read by fastokens
    warn  events 10.0.0.7  KV events are off, the cache is guessed from traffic
          -> start vLLM with --kv-events-config ...

Most faults of a prefix-aware gateway are silent: another chat template, another block size, KV events that nobody
publishes. They all end in cache misses that look like bad luck. The doctor therefore does more than read settings. It
sends each replica one short new prompt, and checks that the engine makes the gateway's tokens, publishes the prompt's
blocks, and finds them again. `CHECKS` lists the checks, and `facts` collects the data that they look at. Problems of
replicas that a running gateway reports are printed in the gateway's own words, and not judged a second time.

Exit codes: 0 if nothing is broken (a `warn` is worth a look). 1 if something is broken, such as a file that a setting
names, or no gateway at the URL of --admin. 2 if the settings themselves are wrong; nothing else is checked then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from gateway.http.server import allow_many_connections
from gateway.ops import gateway_checks as around
from gateway.ops import replica_checks as of_replicas
from gateway.ops.admin_client import side_of
from gateway.ops.findings import Check, Finding
from gateway.ops.gateway_checks import NONE_RUNS, Gateway, PodSearch, find_gateway, find_pods, known_to
from gateway.ops.replica_checks import Engine, Engines, Model, ModelFiles, by_files, by_model
from gateway.ops.trial import Pair, Trial, pairs, try_replica, try_transfer
from gateway.settings import Config, known_urls
from replicas.replica import parse_url

# In the order of the report. As soon as a fact is known, all checks that need it are made.
CHECKS = (
    Check("config", Config, around.given_settings),
    Check("files", Config, around.unusable_files),
    Check("admission", Config, around.idle_settings),
    Check("workers", Config, around.own_redis),
    Check("traces", Config, around.trace_receiver,
          "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT; its port for HTTP is most often 4318"),
    Check("launch", Config, around.unlaunchable, "the gateway does not start with that"),
    Check("redis", Config, around.redis),
    Check("open files", Gateway, around.open_files),
    Check("port", Gateway, around.ports_taken),
    Check("gateway", Gateway, around.running),
    Check("redis", Gateway, around.shared_redis, "see what is said of redis above, and the gateway's log"),
    Check("files", Gateway, around.followed_files),
    Check("background work", Gateway, partial(around.failures, what="background_failures"),
          "do what the error says; else the gateway started it again, and the traceback in its log is worth a report"),
    Check("policy", Gateway, partial(around.failures, what="policy_failures"), "mend the file and restart the gateway, which reads "
          "it at the start; until then requests that it makes no choice for go where the fewest are"),
    Check("prompts", Gateway, around.inexact_prompts, "its log says why: 'a prompt is not known exactly', once a minute for each "
          "path, unless they came before it was ready; hitherto explain shows one"),
    Check("refused by engines", Gateway, around.refused_requests),
    Check("pods", PodSearch, around.pods),
    Check("replica", Engine, of_replicas.replica),
    Check("problems", Engine, of_replicas.own_words),
    Check("replicas", Engines, of_replicas.no_replicas, "give --replica-url http://HOST:PORT, or --launch N"),
    Check("models", Engines, of_replicas.models),
    Check("twice", Engines, of_replicas.duplicates),
    Check("tokenizer", ModelFiles, of_replicas.tokenizer),
    Check("tokenizer files", ModelFiles, of_replicas.exactness),
    Check("chat template", ModelFiles, of_replicas.chat_template),
    Check("block size", Model, of_replicas.block_sizes),
    Check("hash seeds", Model, of_replicas.hash_seeds, "start all with the same PYTHONHASHSEED, or a newer release; nothing to mend "
          "if each has a tier of its own"),
    Check("context", Model, of_replicas.contexts, "start them all with the same --max-model-len if that is not meant"),
    Check("roles", Model, of_replicas.roles),
    Check("trial", Trial, try_replica),
    Check("transfer", Pair, try_transfer),
)  # fmt: skip


def line(finding: Finding) -> str:
    text = f"{finding.level:<5} {finding.subject:<30} {finding.text}"
    return text + (f"\n      -> {finding.remedy}" if finding.remedy else "")


def report_bad_config(text: str) -> int:
    print(line(Finding("fail", text.replace("\n", "; "), subject="config")))
    return 2


def run(args: argparse.Namespace, config: Config) -> int:
    """Make all checks, print their findings, and return the exit code. Raises ConfigError if --admin is no URL."""
    allow_many_connections()  # all engines are asked at once
    return asyncio.run(_run(config, side_of(args.admin, config), bool(args.admin)))


async def _run(config: Config, side: str, is_named: bool) -> int:
    levels, none_runs = list[str](), ""
    async for finding in examine(config, side, is_named):
        print(line(finding), flush=True)
        levels.append(finding.level)
        if finding.subject == "gateway" and finding.text.startswith(NONE_RUNS):
            none_runs = "; no gateway runs with these settings"
    broken, odd = levels.count("fail"), levels.count("warn")
    found = f": {broken} broken, {odd} worth a look" if broken or odd else ", all is well"
    print(f"\n{len(levels)} checks{found}{none_runs}")
    return 1 if broken else 0


async def examine(config: Config, side: str = "", is_named: bool = False) -> AsyncIterator[Finding]:
    """Make all checks, and yield each finding as soon as it is known.

    `side`: the URL of a gateway's admin API; "" for the one in the settings. `is_named`: whether a gateway has to run
    there, because the operator named it with --admin.
    """
    async for fact in facts(config, side or side_of(None, config), is_named):
        for check in CHECKS:
            if isinstance(fact, check.needs):
                async for finding in check.findings(fact):
                    yield finding


async def facts(config: Config, side: str, is_named: bool) -> AsyncIterator[Any]:
    """Yield the data that checks look at, such as settings, engines and models' files, each as soon as it is known.

    The type of a fact decides which checks get it. `side`: the URL of a gateway's admin API. `is_named`: whether the
    operator gave that URL with --admin, so that a gateway has to run there.
    """
    settings, urls = config.settings, [*known_urls(config.settings)]
    yield config
    yield (gateway := await find_gateway(config, side, is_named))
    if settings.discover is not None:
        yield (search := await find_pods(settings.discover))
        urls += search.urls
    addresses = {one.url: one for one in [*known_to(gateway), *map(parse_url, urls)]}
    named = dict.fromkeys([*(parse_url(url).url for url in urls), *addresses])
    engines = [Engine(settings, addresses[url], gateway.entries(url)) for url in named]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.way.close)
        await asyncio.gather(*(engine.ask() for engine in engines if not engine.is_left_out))
        for engine in engines:
            yield engine
        serving = [engine for engine in engines if engine.facts.serving]
        unread = settings.discover is not None or not config.left_out.keys().isdisjoint(("discover", "replica_file"))
        yield Engines(settings, serving, not (engines or gateway.withheld or unread))
        groups = by_model(serving)
        # Where no replica answers and no setting names a model, there is none to check.
        for members in groups or ([[]] if settings.model or settings.launches else []):
            trials = list[Trial]()
            for some in by_files(settings, members):
                yield (files := ModelFiles(settings, some, len(groups) > 1))
                trials += [Trial(engine, replica, files) for engine in some for replica in engine.replicas]
            if members:
                yield Model(members)
            for trial in trials:
                yield trial
            for pair in pairs(trials):
                yield pair
