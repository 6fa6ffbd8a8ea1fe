"""Checks of `hitherto doctor` on a gateway that runs with the same settings, and on what it reports of its replicas."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from gateway.ops.replicas_check import problems_by_subject, remedy_of_silence
from gateway.ops.settings_check import FOLLOWED, check_open_files
from gateway.ops.trial import Finding
from gateway.ports import why_taken
from gateway.settings import ADMIN_SIDE, Config, Settings, admin_headers, admin_url, place_of
from replicas.adopt import Facts
from replicas.duplicates import Name, duplicate
from replicas.engines import TRANSFERS
from replicas.launch.ports import holder
from replicas.lifecycle import TAKES_TRAFFIC, State
from replicas.ports import cannot_listen
from replicas.problems import DRAINED, block_size_set
from replicas.replica import Address, EventSource, parse_url
from replicas.roles import BOTH

ADMIN_SECONDS = 5.0  # for the answer of a gateway's admin side


ENDING = (State.LEAVING, State.DRAINING)
KEPT_OUT = {*State} - {*TAKES_TRAFFIC, State.STOPPED}  # states in which the gateway sends an engine nothing new
NONE_RUNS = "none runs with these settings"  # the beginning of a finding, by which `doctor` recognizes it


class StatusUnavailable(Exception):
    """The server at a gateway's admin port does not give the gateway's status; `finding` says what it does instead."""

    def __init__(self, finding: Finding):
        super().__init__(finding.text)
        self.finding = finding


COMPARED = ("policy", "replica_url", "block_size")  # settings that a gateway's status shows


# By reason of refusals: what clients got from engines, and the remedy.
_REFUSALS = {
    "engines_full": ("429, as every engine that was asked was full", "add replicas (hitherto plan says how many a load needs), "
                     "or have requests wait in the gateway (--admission)"),
    "engines_unauthorized": ("401 or 403 from engines", "give the gateway the key that the engines ask for (--engine-api-key); "
                             "where clients bring it themselves, theirs is missing or wrong"),
}  # fmt: skip


def not_in_force(config: Config, running: Mapping[str, Any]) -> list[str]:
    """Return the settings given here that the running gateway has otherwise, as far as its status shows them.

    Each is written as it was given, such as `--policy least_time`.
    """
    settings, found = config.settings, []
    if config.sources["policy"] != "default" and running.get("policy", settings.policy) != settings.policy:
        found.append(_as_given("policy", config, settings.policy))
    known = {one.get("url") for one in running.get("replicas", ())}
    others = [url for url in settings.replica_url if parse_url(url).url not in known]
    if others and "replicas" in running:
        found.append(_as_given("replica_url", config, *others))
    sizes = {one.get("block_size") for one in running.get("spaces", ())}
    if settings.block_size is not None and sizes - {settings.block_size}:  # a given size holds for all models
        found.append(_as_given("block_size", config, str(settings.block_size)))
    return found


def _as_given(name: str, config: Config, *values: str) -> str:
    return " ".join((place_of(name, config.sources).removeprefix("flag "), *values))


def do_not_count(given: Sequence[str]) -> str:
    """Return the end of a sentence on settings that do not count, as the running gateway has its own."""
    *others, last = given
    named = f"{', '.join(others)} and {last} do" if others else f"{last} does"
    return f"with its own settings: {named} not count"


def _refused(why: str) -> Finding:
    return Finding("fail", "gateway", f"one runs, and its admin side refuses the doctor: {why}",
                   "run the doctor with the --admin-token that the gateway was started with")  # fmt: skip


def _hangs(settings: Settings) -> Finding:
    return Finding(
        "fail",
        "gateway",
        f"something holds the admin port {admin_url(settings).removeprefix('http://')} and does not answer within {ADMIN_SECONDS:g} s",
        "if it is this gateway, it hangs: save `py-spy dump --pid PID` (`ss -ltnp` names the process), then restart it "
        "(runbook HithertoGatewayDown); else stop what holds the port, or give another with --admin-port",
    )


async def running_gateway(settings: Settings, session: aiohttp.ClientSession) -> dict[str, Any] | None:
    """Return the status of the gateway that runs with these settings, or None. Raises StatusUnavailable."""
    with contextlib.suppress(aiohttp.ClientError, ValueError, LookupError, TypeError):
        try:
            async with session.get(
                admin_url(settings) + "/status",
                headers=admin_headers(settings),
                timeout=aiohttp.ClientTimeout(ADMIN_SECONDS),
            ) as response:
                status = await response.json()
        except TimeoutError:
            raise StatusUnavailable(_hangs(settings)) from None
        if response.status in (401, 403) and ADMIN_SIDE in response.headers:
            raise StatusUnavailable(_refused(status["error"]["message"]))
        return status if isinstance(status, dict) and "replicas" in status and "policy" in status else None
    return None


async def other_server(settings: Settings, session: aiohttp.ClientSession) -> str:
    """Return what answers at the admin port where no gateway runs, as far as it can be seen; "" if nothing does."""
    try:
        async with session.get(
            admin_url(settings) + "/status", timeout=aiohttp.ClientTimeout(ADMIN_SECONDS)
        ) as response:
            kind = "a gateway" if ADMIN_SIDE in response.headers else "another server, not a gateway,"
            name = response.headers.get("Server", "")
            return f"{kind} answers there with {response.status} to /status{name and f' ({name[:60]})'}"
    except aiohttp.ClientConnectorError:
        return ""
    except TimeoutError:
        return "what is there does not answer"
    except aiohttp.ClientError:
        return "what is there is no gateway: it does not speak HTTP"


def check_gateway(
    settings: Settings, running: dict[str, Any] | None, known: Collection[str] = (), other: str = ""
) -> Iterator[Finding]:
    """Yield findings from the status of the gateway that runs with these settings, or from its absence.

    `running`: its status, or None. `known`: problems of files that are reported already. `other`: what answers at the
    admin port if no gateway runs.
    """
    if (few := check_open_files(running.get("most_open_files") if running is not None else None)) is not None:
        yield few
    if running is None:
        for setting in ("port", "admin_port"):
            port, host = getattr(settings, setting), getattr(settings, setting.replace("port", "host"))
            wrong = why_taken(host, port)
            if wrong:
                flags = [f"--{one.replace('_', '-')}" for one in (setting, setting.replace("port", "host"))]
                what, _, remedy = cannot_listen(host, port, wrong, *flags).partition(". ")
                if wrong.errno == errno.EADDRINUSE and (process := holder(port)):
                    what += f" by {process}"
                if setting == "admin_port" and other:
                    what += f"; {other}"
                yield Finding("fail", setting, what, remedy[0].lower() + remedy[1:])
        where = f"{admin_url(settings)} ({other or 'nothing listens there'})"
        yield Finding("warn", "gateway", f"{NONE_RUNS} at {where}",
                      "start it with `hitherto serve` and these settings; if one should run, its log says why it ended")  # fmt: skip
        return
    if running["ready"]:
        yield Finding("ok", "gateway", f"runs, ready, policy {running['policy']}")
    else:
        yield Finding("fail", "gateway", f"runs but is not ready: {running['why_not']}", "see the replicas below")
    redis = running.get("map", {}).get("redis", {})
    for what, why in (
        ("map", redis.get("trouble")),
        ("ledger", not redis.get("ledger_joined", True) and redis["ledger_reason"]),
    ):
        if why:
            yield Finding(
                "fail",
                f"redis: {what}",
                f"the gateway that runs is without the {what} that gateways share: {why}",
                "see what is said of redis above, and the gateway's log",
            )
    yield from _check_files(running, known)
    for work, failures in running.get("background_failures", {}).items():
        yield Finding("fail", "background work", f"{work} failed {failures['failures']} times, {failures['seconds_ago']:.0f} s ago with {failures['last']}",
                      "do what the error says; else the gateway started it again, and the traceback in its log is worth a report")  # fmt: skip
    for policy, failures in running.get("policy_failures", {}).items():
        yield Finding("fail", "policy", f"{policy} failed {failures['failures']} times, {failures['seconds_ago']:.0f} s ago: {failures['last']}",
                      "mend the file and restart the gateway, which reads it at the start; "
                      "until then requests that it makes no choice for go where the fewest are")  # fmt: skip
    prompts = running["totals"]["prompts"]
    blind, total = prompts.get("load", 0) + prompts.get("text", 0), sum(prompts.values())
    if total and blind > 0.01 * total:
        yield Finding("warn", "prompts", f"{blind:g} of {total:g} prompts were routed without exact tokens",
                      "its log says why: 'a prompt is not known exactly', once a minute for each path, "
                      "unless they came before it was ready; hitherto explain shows one")  # fmt: skip
    for why, number in running["totals"].get("refused_by_engines", {}).items():
        if number > 0.01 * running["totals"]["requests"]:
            what, remedy = _REFUSALS[why]
            yield Finding("warn", "refused by engines",
                          f"since the start {number:g} of {running['totals']['requests']:g} requests got {what}", remedy)  # fmt: skip
    for one in running.get("refused_tenants", ()):
        yield Finding("warn", f"tenant {one['tenant']}"[:60],
                      f"its limit of {one['limit']} refused {one['requests']:g} requests since the start",
                      "have its clients send less, or raise the limit in the file of --api-keys")  # fmt: skip
    for one in running["replicas"]:
        if one["events"] in ("unobserved", "gap"):
            yield Finding("fail", f"events {one['id']}", f"the gateway calls its KV events {one['events']}: its cache is guessed from traffic"
                          f" ({one['events_reason']})",
                          "see the trial of this replica below, and the gateway's log")  # fmt: skip


def _check_files(running: dict[str, Any], known: Collection[str]) -> Iterator[Finding]:
    """Yield the problems of files that the running gateway follows; the doctor's own settings need not name them."""
    for part, (subject, stays) in FOLLOWED.items():
        why = (running.get(part) or {}).get("problem")
        if why and not any(why in said for said in known):
            yield Finding("fail", subject, f"the gateway that runs cannot use its file: {why}",
                          f"mend it, and it is read again within seconds; until then {stays}")  # fmt: skip


def known_to(running: dict[str, Any] | None) -> list[Address]:
    """Return the engines of the running gateway, with their roles and the sources of events that it follows.

    An older engine does not report its source, which then stands in the gateway's settings alone.
    """
    found: dict[str, Address] = {}
    for one in (running or {}).get("replicas", []):
        source = one.get("event_source") if not one.get("rank") else None
        role, way = one.get("role") or BOTH, one.get("transfer")
        address = parse_url(one["url"])._replace(
            source=EventSource(**source) if source else None,
            role=role,
            transfer=way if way in TRANSFERS else "",
            bootstrap=one.get("bootstrap") or 0,
        )
        if address.url not in found or address.source is not None:
            found[address.url] = address
    return list(found.values())


def check_kept_out(address: Address, running: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield the replicas at this address that the running gateway sends nothing to, with its reason.

    The gateway remembers what was there before. What answers now may be no engine, and one look would misjudge it.
    """
    for one in (running or {}).get("replicas", []):
        state = one.get("state")
        if one["url"] == address.url and state in KEPT_OUT:
            yield Finding("warn" if state in ENDING else "fail", f"replica {one['id']}",
                          f"the gateway calls it {state}: {one['reason']}",
                          f"{_remedy_of_kept_out(one)}; its other checks are skipped")  # fmt: skip


def _remedy_of_kept_out(replica: dict[str, Any]) -> str:
    fault = replica.get("fault")
    if replica["state"] in ENDING:
        drained = replica["state"] == State.DRAINING
        again = f"hitherto replicas add {replica['url']}" if drained else "start it when it has ended"
        return f"nothing, it finishes the {replica.get('inflight', 0)} requests that it has; to use it again, {again}"
    if replica.get("managed") and fault != "timeout":
        return "the gateway starts it by itself, and again whenever it ends: wait for it to load, or see why it ended in the gateway's log"
    return remedy_of_silence(fault, parse_url(replica["url"]).port)


def check_drained(settings: Settings, address: Address, running: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield the replicas at this address that were drained and not added back, with the gateway's reason."""
    for one in (running or {}).get("replicas", []):
        if one["url"] == address.url and one.get("state") == "stopped":
            yield Finding(
                "warn",
                f"replica {one['id']}",
                f"{one['reason']}, {_minutes(one['since_seconds'])} ago: {DRAINED}",
                f"hitherto replicas add {one['url']} --admin {admin_url(settings)}"
                + (" --admin-token @FILE" if admin_headers(settings) else ""),
            )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def ended_by_drain(address: Address, running: dict[str, Any] | None) -> bool:
    """Return whether the gateway launched this engine and ended it by a drain, so that nothing should answer there."""
    known = [one for one in (running or {}).get("replicas", []) if one["url"] == address.url]
    return any(one.get("managed") and one.get("state") == "stopped" for one in known)


def block_sizes_in_force(running: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the block size given to the running gateway, by URL of each engine that has another one.

    Its status holds the sizes in use, which are learned where none is given; a given one shows by the problem it
    causes.
    """
    sizes = {id: one["block_size"] for one in (running or {}).get("spaces", ()) for id in one["replicas"]}
    return {
        one["url"]: size
        for one in (running or {}).get("replicas", ())
        if (size := sizes.get(one["id"]))
        and str(block_size_set(size, one.get("block_size"))) in one.get("problems", ())
    }


def check_seen_by_gateway(
    running: dict[str, Any] | None,
    replicas: list[tuple[Address, Facts]],
    untried: Collection[str] = (),
    names: Sequence[Name] = (),
    block_size: int | None = None,
) -> Iterator[Finding]:
    """Yield problems that only traffic shows, and those of replicas that only the running gateway knows.

    `untried`: URLs to leave out. `names`: the replicas, whose duplicates `check_duplicates` reports. `block_size`: the
    doctor's own setting, which `check_block_size` judges together with the gateway's.
    """
    in_force = block_sizes_in_force(running)
    known = {str(problem) for address, facts in replicas for problem in problems_by_subject(address, facts).values()}
    known |= {str(problem) for one in names if (problem := duplicate(one, names)) is not None}
    known |= {str(facts.unfit(block_size or in_force.get(address.url), address.source)) for address, facts in replicas}
    for one in (running or {}).get("replicas", []):
        if (slow := one.get("slow")) and one.get("url") not in untried:
            yield Finding("warn", f"traffic {one['id']}", slow["text"])
        for problem in one.get("problems", []):
            if problem not in known and one.get("url") not in untried and not problem.startswith(DRAINED):
                yield Finding("warn", f"traffic {one['id']}", problem)


def check_variants(running: dict[str, Any] | None, continues: bool = False) -> Iterator[Finding]:
    """Yield a warning for each model of which the running gateway sees several variants.

    It sees more than the doctor, as it knows from which folder each engine was started. `continues`: whether it resumes
    streams that break off.
    """
    spaces = [space for space in (running or {}).get("spaces", []) if space["variants"] > 1]
    for name in sorted({name for space in spaces for name in space["models"]}):
        told = [f"{', '.join(one['replicas'])} (blocks of {one['block_size']}, {one['directory'] or 'no files'}, "
                f"version {', '.join(one['versions']) or 'unknown'})"
                for one in spaces if name in one["models"]]  # fmt: skip
        more = (
            "; prompts are prepared for two of them, the replicas of the others are chosen by load alone"
            if len(told) > 2
            else ""
        )
        roles = {one["id"]: one.get("role", BOTH) for one in (running or {}).get("replicas", [])}
        if any(roles.get(id, BOTH) != BOTH for one in spaces if name in one["models"] for id in one["replicas"]):
            more += "; both legs of a request use replicas of one variant"
            more += ", and variants that prompts are not prepared for get no legs" if len(told) > 2 else ""
        if continues:
            more += "; a stream that breaks off is resumed by a replica of its own variant alone"
        yield Finding("warn", f"variants {name}"[:60], f"the gateway tells {len(told)} apart: {' | '.join(told)}{more}",
                      "nothing to mend during an upgrade; restart the engines that are behind so that all are alike")  # fmt: skip
