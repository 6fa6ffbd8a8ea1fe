"""The checks of `hitherto doctor` on settings, on a running gateway, and on what gateways use: Redis and pods."""

from __future__ import annotations

import asyncio
import resource
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gateway.errors import ApiError
from gateway.http.room import FEWEST_FILES, too_few
from gateway.model import launches
from gateway.ops import traces
from gateway.ops.admin_client import NOBODY, Unanswered, ask
from gateway.ops.findings import Finding, fail, ok, warn
from gateway.ports import why_taken
from gateway.settings import Config, ConfigError
from gateway.settings.warnings import find_warnings
from replicas.cluster_api import Pods, PodsError
from replicas.discovery import wanted
from replicas.engines import TRANSFERS
from replicas.event_source import EventSource
from replicas.pods import Discover, place
from replicas.ports import cannot_listen
from replicas.replica import Address, parse_url
from replicas.roles import BOTH

if TYPE_CHECKING:
    from cachemap.cluster.connect import RedisUrl

ADMIN_SECONDS = 5.0  # for the answer of a gateway's admin API
NONE_RUNS = "none runs with these settings"  # the beginning of a finding; `doctor` recognizes the finding by it
PINGS = 20
NEAR_SECONDS = 0.002  # the longest time that a decision waits for Redis
# Part of a gateway's status -> the doctor's name for that part, and what stays in use while its file cannot be used.
FOLLOWED = {
    "api_keys": ("api keys", "the keys read before stay good, also one that was taken out since"),
    "tls": ("tls", "the certificate read before stays in use"),
}
# The Redis commands that gateways send. The doctor tries them with a key K of its own, which expires; the last command
# deletes it.
REDIS_COMMANDS = (
    "HSET K f v; SET K 1 XX; EXPIRE K 9; PEXPIRE K 9000; PTTL K; EXISTS K; TYPE K; GETRANGE K 0 0; LINDEX K 0; RPUSH K v; RENAME K K; "
    "XADD K NOMKSTREAM * f v; XTRIM K MAXLEN 0; XRANGE K - +; XREAD STREAMS K 0; TIME; HGET K f; HDEL K f; HLEN K; HKEYS K; HMGET K f; "
    "HGETALL K; ZADD K XX 1 m; ZREM K m; ZCARD K; ZSCORE K m; ZRANGEBYSCORE K 0 0; EVAL return 0; EVALSHA 0 0; UNLINK K; DEL K"
)
REFUSED_BY_ENGINES = {  # reason -> what clients got from engines, and the remedy
    "engines_full": ("429, as every engine that was asked was full", "add replicas (hitherto plan says how many a load needs), "
                     "or have requests wait in the gateway (--admission)"),
    "engines_unauthorized": ("401 or 403 from engines", "give the gateway the key that the engines ask for (--engine-api-key); "
                             "where clients bring it themselves, theirs is missing or wrong"),
}  # fmt: skip


def given_settings(config: Config) -> Iterator[Finding]:
    """Report how many settings were given, and from which files they were read."""
    given = [source for source in config.sources.values() if source != "default"]
    files = sorted({source.split(":")[0].removeprefix("file ") for source in given if source.startswith("file ")})
    yield ok(", read ".join([f"{len(given)} of {len(config.sources)} settings given", *files]))


def unusable_files(config: Config) -> Iterator[Finding]:
    """Yield a failure for each file that settings name and that cannot be used, except launch profiles.

    `unlaunchable` checks the profiles.
    """
    for setting, why in config.unusable.items():
        if setting not in ("profile", "pools"):
            followed = "tls" if setting.startswith("tls_") else setting
            subject, stays = FOLLOWED.get(followed, (setting.replace("_", " "), ""))
            left_out = "; the checks below are made without it" if setting in config.left_out else ""
            remedy = "mend it: no gateway starts with it" + (f"; in one that runs {stays}" if stays else left_out)
            yield fail(why, remedy, subject)


def idle_settings(config: Config) -> Iterator[Finding]:
    """Yield a warning for each setting that has no effect."""
    return (warn(*warning) for warning in find_warnings(config.settings))


def own_redis(config: Config) -> Iterator[Finding]:
    """Look for the Redis server program that workers need if the settings name no Redis."""
    from gateway.workers.private_redis import server

    if config.settings.workers > 1 and config.settings.redis_url is None:
        try:
            yield ok(f"share a Redis of their own, {server()}")
        except ConfigError as error:
            yield fail(str(error))


async def trace_receiver(config: Config) -> AsyncIterator[Finding]:
    """Check whether the receiver of traces accepts them, if the environment names a receiver."""
    try:
        receiver = traces.receiver()
    except ConfigError as error:
        yield fail(str(error))
        return
    if receiver is not None:
        from gateway.ops.spans import refusal

        why = await asyncio.to_thread(refusal, 2.0)
        yield warn(f"{receiver} does not take them: {why}") if why else ok(f"{receiver} takes them")


def unlaunchable(config: Config) -> Iterator[Finding]:
    """Yield a failure for each reason why the engines in the settings cannot be launched, as `serve` reports it."""
    try:
        launches(config.settings)
    except ConfigError as error:
        yield from map(fail, error.placed(config.sources).splitlines())


async def redis(config: Config) -> AsyncIterator[Finding]:
    """Check each server of the Redis that gateways share: its version, eviction, latency and permissions."""
    if config.settings.redis_url is None:
        return
    from cachemap.cluster.connect import FAILURES, NONSENSE, describe, parse, strange

    whole = parse(config.settings.redis_url)
    parts = [whole._replace(kind="single", hosts=[host]) for host in whole.hosts if whole.kind == "cluster"] or [whole]
    for part in parts:
        subject = "redis {}:{}".format(*part.hosts[0]) if len(parts) > 1 else "redis"
        try:
            findings = await _redis_server(part, config.settings.deployment, is_cluster=part is not whole)
        except (*FAILURES, *NONSENSE) as error:
            why = describe(strange("INFO", error) if isinstance(error, NONSENSE) else error)
            remedy = (
                "gateways go on alone until it answers; look at its address, password, TLS settings and its own log"
            )
            findings = [fail(f"{part} cannot be used: {why}", remedy)]
        for one in findings:
            yield one._replace(subject=subject)


async def _redis_server(part: RedisUrl, deployment: str, is_cluster: bool) -> list[Finding]:
    """Return findings about one Redis server's version, eviction, latency and permissions.

    `part`: the URL of this server alone. `deployment`: the name under which gateways share their keys. `is_cluster`:
    whether the URL says that the server is part of a Redis Cluster. Raises what the Redis client raises.
    """
    from cachemap.cluster.connect import OLDEST, REFUSES, connect, describe

    client, times, refused = connect(part), [], {}
    try:
        info = await client.info()
        version, memory = str(info.get("redis_version", "0")), int(info.get("maxmemory", 0))
        is_old = tuple(int(number) for number in version.split(".")[:2]) < OLDEST
        for _ in range(PINGS):
            began = perf_counter()
            await client.ping()
            times.append(perf_counter() - began)
        key, pipeline = f"hitherto:1:{deployment}:doctor:{secrets.token_hex(4)}", client.pipeline(transaction=False)
        commands = [command.split() for command in REDIS_COMMANDS.split("; ")]
        for words in commands:
            pipeline.execute_command(*(key if word == "K" else word for word in words))
        for words, answer in zip(commands, await pipeline.execute(raise_on_error=False), strict=True):
            if isinstance(answer, Exception) and (said := describe(answer)).startswith(REFUSES):
                refused[words[0]] = said
    finally:
        await client.aclose()
    if info.get("cluster_enabled") and not is_cluster:
        return [fail(f"{part} cannot be used: it is a Cluster", "write redis+cluster:// in the URL")]
    if is_old:
        found = [fail(f"{part} is Redis {version}", "run Redis 6.2 or later")]
    else:
        found = [ok(f"{part} answers, Redis {version}")]
    policy, median = str(info.get("maxmemory_policy", "noeviction")), sorted(times)[PINGS // 2]
    if memory and policy != "noeviction" and not policy.startswith("volatile-"):  # volatile keys are written again
        said = "drops leases and loads at random, which makes gateways write by turns and count wrong"
        remedy = "set maxmemory-policy noeviction, and memory enough: 16 bytes a block and 1 kB a replica"
        found.append(fail(f"maxmemory-policy {policy} {said}", remedy))
    else:
        found.append(ok("drops nothing that gateways do not write again within a second or two"))
    said = f"answers in {median * 1000:.2f} ms (median of {PINGS})"
    if median > NEAR_SECONDS:
        far = ": decisions wait 2 ms for it at most, so most are made by the local view"
        found.append(warn(said + far, "put Redis nearer to the gateways"))
    else:
        found.append(ok(said))
    if refused:
        remedy = "see the ACL that docs/scaling.md lists, and that the URL leads to a primary that takes writes"
        found.append(fail(f"refuses {', '.join(refused)}: {next(iter(refused.values()))}", remedy))
    else:
        found.append(ok("takes all commands of gateways"))
    return found


@dataclass
class PodSearch:
    """The pods that a Kubernetes cluster's API lists for the setting `discover`.

    `urls`: the URLs of those that are replicas. `error`: why the API could not be asked, or "".
    """

    discover: Discover
    urls: list[str] = field(default_factory=list)
    complaints: set[str] = field(default_factory=set)  # why other pods are no replicas
    error: str = ""


async def find_pods(discover: Discover) -> PodSearch:
    """Ask the cluster's API once for the pods that `discover` selects."""
    try:
        found, complaints = wanted(discover, await Pods(discover, place(discover), lambda _: None).list())
    except PodsError as error:
        return PodSearch(discover, error=str(error))
    return PodSearch(discover, [url for url, _ in found.values()], complaints)


def pods(search: PodSearch) -> Iterator[Finding]:
    """Report whether the cluster's API lists the pods, and how many of them are replicas."""
    roles = Counter(parse_url(url).role for url in search.urls)
    if search.error:
        yield fail(search.error, "the gateway goes on with the replicas that it knows")
    elif search.urls:
        said = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
        yield ok(f"{len(search.urls)} are replicas ({said})")
    else:
        remedy = "see discover.selector and discover.namespace; a pod needs an address"
        yield fail(f"none that {search.discover.selector!r} selects is a replica", remedy)
    for one in sorted(search.complaints):
        yield warn(f"{one}: it gets no requests", "correct the label, or the selector")


@dataclass
class Gateway:
    """A running gateway as its admin API shows it, or why none is known to run.

    `is_named`: whether the operator named the admin API with --admin, so a gateway has to run there.
    """

    config: Config
    side: str = ""  # the admin API's URL
    is_named: bool = False
    status: dict[str, Any] = field(default_factory=dict)  # the running gateway's status; {} if none is known to run
    withheld: Finding | None = None  # why a gateway that may run does not give its status
    other: str = ""  # why no gateway's status is known otherwise, in words

    def entries(self, url: str) -> list[dict[str, Any]]:
        """Return the entries in the gateway's status of the replicas behind this engine's URL."""
        return [one for one in self.status.get("replicas", ()) if one.get("url") == url]


async def find_gateway(config: Config, side: str, is_named: bool = False) -> Gateway:
    """Ask the admin API at the URL `side` for a gateway's status, and return what it shows, or why it shows nothing.

    `is_named`: whether the operator gave the URL with --admin, so that a gateway has to run there.
    """
    gateway = Gateway(config, side, is_named)
    try:
        gateway.status = await asyncio.to_thread(ask, side, config, "GET", "/status", seconds=ADMIN_SECONDS)
    except ConfigError as refused:
        remedy = "run the doctor with the --admin-token that the gateway was started with"
        gateway.withheld = fail(f"one runs, and refuses the doctor: {refused}", remedy)
    except (ApiError, Unanswered) as error:
        gateway.other = str(error)
        if getattr(error, "hangs", False):
            gateway.withheld = fail(
                f"something holds the admin port {side.partition('://')[2]} and does not answer within {ADMIN_SECONDS:g} s",
                "if it is this gateway, it hangs: save `py-spy dump --pid PID` (`ss -ltnp` names the process), then restart it "
                "(runbook HithertoGatewayDown); else stop what holds the port, or give another with --admin-port",
            )
    return gateway


def open_files(gateway: Gateway) -> Iterator[Finding]:
    """Warn if a gateway may open too few files for its connections.

    The limit is that of the running gateway or, if none runs, of a gateway started from here.
    """
    if text := too_few(gateway.status.get("most_open_files") or resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        yield warn(
            text,
            f"raise the hard limit where the gateway is started to {FEWEST_FILES} at least: LimitNOFILE in a systemd unit, "
            "`ulimit -Hn` in a shell",
        )


def ports_taken(gateway: Gateway) -> Iterator[Finding]:
    """Yield a failure for each port on which a gateway could not listen.

    Nothing is checked if a gateway may be running already, or if --admin names one.
    """
    known = gateway.status or gateway.withheld or gateway.is_named
    for setting in () if known else ("port", "admin_port"):
        names = (setting, setting.replace("port", "host"))
        port, host = (getattr(gateway.config.settings, name) for name in names)
        if wrong := why_taken(host, port):
            flags = [f"--{name.replace('_', '-')}" for name in names]
            what, _, remedy = cannot_listen(host, port, wrong, *flags).partition(". ")
            if setting == "admin_port" and gateway.other != NOBODY:
                what += f"; {gateway.other}"
            yield fail(what, remedy[0].lower() + remedy[1:], setting)


def running(gateway: Gateway) -> Iterator[Finding]:
    """Report whether a gateway runs and is ready."""
    status = gateway.status
    if gateway.withheld is not None:
        yield gateway.withheld
    elif not status:
        remedy = "start it with `hitherto serve` and these settings; if one should run, its log says why it ended"
        yield (fail if gateway.is_named else warn)(f"{NONE_RUNS} at {gateway.side} ({gateway.other})", remedy)
    elif status["ready"]:
        yield ok(f"runs, ready, policy {status['policy']}")
    else:
        yield fail(f"runs but is not ready: {status['why_not']}", "see the replicas below")


def shared_redis(gateway: Gateway) -> Iterator[Finding]:
    """Yield a failure if the running gateway cannot use the cache map or the load ledger that gateways share."""
    told = gateway.status.get("map", {}).get("redis", {})
    ledger = "" if told.get("ledger_joined", True) else told["ledger_reason"]
    for what, why in (("map", told.get("trouble")), ("ledger", ledger)):
        if why:
            yield fail(f"the gateway that runs is without the {what} that gateways share: {why}", "", f"redis: {what}")


def followed_files(gateway: Gateway) -> Iterator[Finding]:
    """Yield a failure for each followed file (API keys, TLS) that the running gateway cannot use now.

    A problem that `unusable_files` has reported is not reported again.
    """
    for part, (subject, stays) in FOLLOWED.items():
        why = (gateway.status.get(part) or {}).get("problem")
        if why and not any(why in said for said in gateway.config.unusable.values()):
            remedy = f"mend it, and it is read again within seconds; until then {stays}"
            yield fail(f"the gateway that runs cannot use its file: {why}", remedy, subject)


def failures(gateway: Gateway, what: str) -> Iterator[Finding]:
    """Yield a failure for each kind of work that failed in the running gateway lately.

    `what`: the field of the gateway's status that lists such failures.
    """
    for work, one in gateway.status.get(what, {}).items():
        yield fail(f"{work} failed {one['failures']} times, {one['seconds_ago']:.0f} s ago: {one['last']}")


def inexact_prompts(gateway: Gateway) -> Iterator[Finding]:
    """Warn if more than 1 % of the running gateway's prompts were routed without exact tokens."""
    prompts = gateway.status.get("totals", {}).get("prompts", {})
    blind, total = prompts.get("load", 0) + prompts.get("text", 0), sum(prompts.values())
    if blind > 0.01 * total:
        yield warn(f"{blind:g} of {total:g} prompts were routed without exact tokens")


def refused_requests(gateway: Gateway) -> Iterator[Finding]:
    """Warn of requests that were refused by engines, if they are more than 1 % of all, or by a tenant's limit.

    Tenants get a warning each, for the limit that refused their requests.
    """
    totals = gateway.status.get("totals", {})
    for why, number in totals.get("refused_by_engines", {}).items():
        if number > 0.01 * totals["requests"]:
            what, remedy = REFUSED_BY_ENGINES[why]
            yield warn(f"since the start {number:g} of {totals['requests']:g} requests got {what}", remedy)
    for one in gateway.status.get("refused_tenants", ()):
        said = f"its limit of {one['limit']} refused {one['requests']:g} requests since the start"
        remedy = "have its clients send less, or raise the limit in the file of --api-keys"
        yield warn(said, remedy, f"tenant {one['tenant']}"[:60])


def known_to(gateway: Gateway) -> list[Address]:
    """Return the addresses of the running gateway's engines, with their roles, transfers and KV event sources."""
    found: dict[str, Address] = {}
    for one in gateway.status.get("replicas", ()):
        source, way = one.get("event_source") if not one.get("rank") else None, one.get("transfer")
        address = parse_url(one["url"])._replace(
            source=EventSource(**source) if source else None,
            role=one.get("role") or BOTH,
            transfer=way if way in TRANSFERS else "",
            bootstrap=one.get("bootstrap") or 0,
        )
        if address.url not in found or address.source is not None:
            found[address.url] = address
    return list(found.values())
