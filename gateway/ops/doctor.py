"""The command `hitherto doctor`: one line per thing that can be wrong, and what to do about it.

    ok    tokenizer        fastokens, 128000 tokens, 8 kB in 0.02 ms
    warn  events 10.0.0.7  KV events are off, the cache is guessed from traffic
          -> start vLLM with --kv-events-config ...

Most faults of a prefix-aware gateway are silent: another chat template, another block size, events that nobody
publishes. All of them end in cache misses that look like bad luck. So the doctor does not only read settings: it sends
each replica one short new prompt, and checks that the engine counts the same tokens, publishes the blocks, and finds
them again.

Exit codes: 0 if nothing is broken (`warn` is worth a look), 1 if something is, such as a file that a setting names, and
2 if the settings themselves are wrong, in which case nothing else is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp

from gateway.http.server import allow_many_connections
from gateway.ops.event_ports import EventPorts
from gateway.ops.gateway_check import (
    NONE_RUNS,
    StatusUnavailable,
    block_sizes_in_force,
    check_drained,
    check_gateway,
    check_kept_out,
    check_seen_by_gateway,
    check_variants,
    do_not_count,
    ended_by_drain,
    known_to,
    not_in_force,
    other_server,
    running_gateway,
)
from gateway.ops.pods_check import find_pods
from gateway.ops.prompt_check import check_model, check_prompts
from gateway.ops.redis_check import redis_findings
from gateway.ops.replicas_check import (
    by_files,
    by_model,
    check_block_size,
    check_clock,
    check_context,
    check_duplicates,
    check_hash_seeds,
    check_models,
    check_own_words,
    check_reached,
    check_roles,
    problems_by_subject,
)
from gateway.ops.settings_check import (
    check_launches,
    check_named_files,
    check_no_replicas,
    check_own_redis,
    check_settings,
    check_traces,
)
from gateway.ops.transfer_trial import transfers
from gateway.ops.trial import Finding, Trial, trials
from gateway.prompt.pipeline import Pipeline
from gateway.settings import Config, known_urls, read_engine_key
from gateway.settings.warnings import find_warnings
from replicas.access import PROBE_SECONDS, Access
from replicas.adopt import Facts, described
from replicas.duplicates import Name
from replicas.problems import Problem
from replicas.replica import Address, bearer, parse_url
from replicas.tls import context_for


def line(finding: Finding) -> str:
    text = f"{finding.level:<5} {finding.subject:<30} {finding.text}"
    return text + (f"\n      -> {finding.remedy}" if finding.remedy else "")


def report_bad_config(text: str) -> int:
    print(line(Finding("fail", "config", text.replace("\n", "; "))))
    return 2


def run(config: Config) -> int:
    """Print the findings, and return the exit code."""
    allow_many_connections()  # all engines are asked at once
    return asyncio.run(_run(config))


async def _run(config: Config) -> int:
    levels, none_runs = list[str](), ""
    async for finding in examine(config):
        print(line(finding), flush=True)
        levels.append(finding.level)
        if finding.subject == "gateway" and finding.text.startswith(NONE_RUNS):
            none_runs = "; no gateway runs with these settings"
    broken, odd = levels.count("fail"), levels.count("warn")
    found = f": {broken} broken, {odd} worth a look" if broken or odd else ", all is well"
    print(f"\n{len(levels)} checks{found}{none_runs}")
    return 1 if broken else 0


async def examine(config: Config) -> AsyncIterator[Finding]:
    """Yield the findings of all checks, as they are made."""
    settings = config.settings
    yield check_settings(config)
    for finding in check_named_files(config):
        yield finding
    for warning in find_warnings(settings):
        yield Finding("warn", "admission", *warning)
    if settings.redis_url is not None:
        async for finding in redis_findings(settings.redis_url, settings.deployment):
            yield finding
    elif settings.workers > 1:
        yield check_own_redis()
    if (finding := await check_traces()) is not None:
        yield finding
    async with Examination(config) as under_way:
        for part in (under_way.gateway, under_way.engines, under_way.models):
            async for finding in part():
                yield finding


class Examination(contextlib.AsyncExitStack):
    """An examination of the gateway, then of its engines, then of their models; each part uses the results before."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config, self._settings = config, config.settings
        self._running: dict[str, Any] | None = None  # the status of a gateway that runs with these settings
        self._status_unavailable = False  # a gateway may run, and refuses its status
        self._replicas: list[tuple[Address, Facts]] = []
        self._ways: dict[str, Access] = {}
        self._event_ports = EventPorts()

    async def gateway(self) -> AsyncIterator[Finding]:
        """Check the gateway that runs with these settings, if one does."""
        try:
            async with aiohttp.ClientSession() as session:
                self._running = await running_gateway(self._settings, session)
                other = "" if self._running else await other_server(self._settings, session)
            for finding in check_gateway(self._settings, self._running, self._config.unusable.values(), other):
                yield finding
            if self._running and (given := not_in_force(self._config, self._running)):
                yield Finding("warn", "gateway settings", f"the gateway runs {do_not_count(given)}",
                              "examine it with the settings that it was started with, or start it again with these")  # fmt: skip
        except StatusUnavailable as unavailable:
            self._status_unavailable = True
            yield unavailable.finding
        for finding in check_launches(self._config):
            yield finding

    async def engines(self) -> AsyncIterator[Finding]:
        """Check the engines that the settings, the cluster's pods or the running gateway name."""
        urls = [*known_urls(self._settings)]
        if self._settings.discover is not None:
            found, findings = await find_pods(self._settings.discover)
            urls += found
            for finding in findings:
                yield finding
        addresses = [parse_url(url) for url in urls]
        named = {one.url for one in addresses}
        addresses += [one for one in known_to(self._running) if one.url not in named]
        kept_out = {address.url: [*check_kept_out(address, self._running)] for address in addresses}
        untried = {one.url for one in addresses if kept_out[one.url] or ended_by_drain(one, self._running)}
        asked = [one for one in addresses if one.url not in untried]
        answered = await asyncio.gather(*map(self._ask, asked))
        for way, facts in answered:
            if facts.serving:
                self._event_ports.add(way.address, facts.events(way.events))
        answers = iter(answered)
        for address in addresses:
            for finding in (*kept_out[address.url], *check_drained(self._settings, address, self._running)):
                yield finding
            if address.url not in untried:
                way, facts = next(answers)
                for finding in self._engine(address, way, facts):
                    yield finding
                if facts.fault in ("connect", "refused") and (
                    held := await self._event_ports.check_held(address, way.address or address.host)
                ):
                    yield held
        names = [*map(self._name, self._replicas)]
        for finding in check_seen_by_gateway(self._running, self._replicas, untried, names, self._settings.block_size):
            yield finding
        unknown = self._settings.discover is not None or not self._config.left_out.keys().isdisjoint(
            ("discover", "replica_file")
        )
        if not addresses and not self._status_unavailable and not unknown:
            yield check_no_replicas(self._settings)

    async def _ask(self, address: Address) -> tuple[Access, Facts]:
        tls = context_for(address.url, self._settings.replica_ca)
        way = Access(address.url, address.host, tls, address.source, bearer(read_engine_key(self._settings)))
        self.push_async_callback(way.close)
        return way, await way.find(PROBE_SECONDS)

    def _engine(self, address: Address, way: Access, facts: Facts) -> Iterator[Finding]:
        yield check_reached(address, facts)
        if way.problem:
            yield Finding("warn", f"name {address.id}", way.problem.what, way.problem.remedy)
        if facts.serving:
            address, self._ways[address.id] = address._replace(source=way.events), way
            self._replicas.append((address, facts))
            yield from check_own_words(address, facts, self._problems(address, facts))

    def _problems(self, address: Address, facts: Facts) -> dict[str, Problem]:
        """Return what the engine reports of itself, with remedies that suit the other engines of its host."""
        host, ranks = self._ways[address.id].address, len(facts.engines)
        found = problems_by_subject(address, facts)
        return {name: self._event_ports.remedy(one, address.url, host, ranks) for name, one in found.items()}

    async def models(self) -> AsyncIterator[Finding]:
        """Check what replicas of each model have in common, and try each replica."""
        groups = by_model(self._replicas)
        # Where no replica answers and no setting names a model, there is none to check.
        if not groups and (self._settings.model or self._settings.launches):
            groups = [[]]
        if self._replicas:
            yield check_models(self._replicas)
            for finding in check_duplicates(map(self._name, self._replicas)):
                yield finding
            yield await check_clock(self._ways)
        for group in groups:
            async for finding in self._model(group, len(groups) > 1):
                yield finding
        for finding in check_variants(self._running, self._settings.continue_streams != "never"):
            yield finding

    def _name(self, replica: tuple[Address, Facts]) -> Name:
        address, facts = replica
        created = facts.scrape.created if facts.scrape else None
        return Name(address.id, self._ways[address.id].address, address.port, created)

    async def _model(self, group: list[tuple[Address, Facts]], one_of_several: bool) -> AsyncIterator[Finding]:
        """Check the replicas of one model: its files, what the replicas must share, and a trial of each."""
        settings = self._settings
        prompts: dict[str, tuple[Pipeline | None, str]] = {}  # by replica: its pipeline, and the name of its model
        for variant in by_files(settings, group):
            facts_of = [facts for _, facts in variant]
            served, directory, finding = check_model(settings, facts_of, one_of_several)
            yield finding
            pipeline = None
            if directory:
                pipeline, findings = check_prompts(settings, directory, served, facts_of)
                for finding in findings:
                    yield finding
            prompts |= {address.id: (pipeline, served) for address, _ in variant}
        if group:
            yield check_block_size(settings, group, block_sizes_in_force(self._running))
            if (finding := check_hash_seeds(group)) is not None:
                yield finding
            yield check_context(group)
            if (finding := check_roles([described(address, facts)[0] for address, facts in group])) is not None:
                yield finding
        tried: list[Trial] = []
        for address, facts in group:
            pipeline, served = prompts[address.id]
            if pipeline is not None:
                pipeline.block_size = settings.block_size or facts.block_size or pipeline.block_size
                pipeline.follow(facts.dialect.version_quirks(facts.version))
            for replica in described(address, facts):
                session, problems = self._ways[address.id].session, self._problems(address, facts)
                tried.append(Trial(settings, session, pipeline, served, replica, problems))
                async for finding in trials(tried[-1]):
                    yield finding
        async for finding in transfers(tried):
            yield finding
