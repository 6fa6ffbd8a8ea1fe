"""The checks of `hitherto doctor`: what each looks at, and what it finds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp

from gateway.config import LEFT_OUT, Config, ConfigError, Settings, admin_headers, admin_url
from gateway.model import folder_here, launches, model_dir
from gateway.ops import traces
from gateway.ops.trial import WORDS, Finding
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.report import template_report
from replicas import pairing, twins
from replicas.access import Access
from replicas.adopt import IS_GATEWAY, Facts, problems_of
from replicas.ask import LATE
from replicas.engines import TRANSFERS
from replicas.problems import DRAINED, Problem
from replicas.replica import Address, EventSource, Replica, parse_url
from replicas.roles import BOTH, REMEDY, SPEAK_ALIKE, lacks, unlike
from replicas.served import base_names, count_models, marks
from replicas.simulated import complaints

SKEW_SECONDS = 2.0  # Date headers have whole seconds
PROBE_SECONDS = 2.0  # for a name to be resolved, and for each answer
ADMIN_SECONDS = 5.0  # for the answer of a gateway's admin side

NONE_RUNS = Finding("ok", "gateway", "none runs with these settings")


# --- this machine


def check_settings(config: Config) -> Finding:
    given = [source for source in config.sources.values() if source != "default"]
    files = sorted({source.split(":")[0] for source in given if source.startswith("file ")})
    parts = [
        f"{len(given)} of {len(config.sources)} settings given",
        *(f"read {name.removeprefix('file ')}" for name in files),
    ]
    return Finding("ok", "config", ", ".join(parts))


def check_named_files(config: Config) -> Iterator[Finding]:
    """Files that settings name and that cannot be used. Profiles are for `check_launches` to judge."""
    for setting, why in config.unusable.items():
        if setting not in ("profile", "pools"):
            subject, stays = _FOLLOWED.get(
                "tls" if setting.startswith("tls_") else setting, (setting.replace("_", " "), "")
            )
            left_out = "; the checks below are made without it" if setting in LEFT_OUT else ""
            yield Finding("fail", subject, why,
                          "mend it: no gateway starts with it" + (f"; in one that runs {stays}" if stays else left_out))  # fmt: skip


def check_own_redis() -> Finding:
    """What workers share where no Redis is named."""
    from gateway.workers.private_redis import server

    try:
        return Finding("ok", "workers", f"share a Redis of their own, {server()}")
    except ConfigError as error:
        return Finding("fail", "workers", str(error))


async def check_traces() -> Finding | None:
    """Whether they arrive, if the environment wants them."""
    try:
        receiver = traces.receiver()
    except ConfigError as error:
        return Finding("fail", "traces", str(error))
    if receiver is None:
        return None
    from gateway.ops.spans import refusal

    why = await asyncio.to_thread(refusal, 2.0)
    if why:
        return Finding(
            "warn",
            "traces",
            f"{receiver} does not take them: {why}",
            "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT; its port for HTTP is most often 4318",
        )
    return Finding("ok", "traces", f"{receiver} takes them")


class StatusUnavailable(Exception):
    """Something is at a gateway's admin port and does not say how the gateway is; `finding` says what it does."""

    def __init__(self, finding: Finding):
        super().__init__(finding.text)
        self.finding = finding


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
    """The status of the gateway that runs with these settings, if one does. Raises StatusUnavailable."""
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
        if response.status in (401, 403):
            raise StatusUnavailable(_refused(status["error"]["message"]))
        return status if isinstance(status, dict) and "replicas" in status and "policy" in status else None
    return None


def check_gateway(settings: Settings, running: dict[str, Any] | None, known: Collection[str] = ()) -> Iterator[Finding]:
    """What the gateway that runs with these settings says of itself. `known`: what has been said of files already."""
    if running is None:
        for setting in ("port", "admin_port"):
            port, host = getattr(settings, setting), getattr(settings, setting.replace("port", "host"))
            wrong = _taken(host, port)
            if wrong:
                flags = [f"--{one.replace('_', '-')}" for one in (setting, setting.replace("port", "host"))]
                what, _, remedy = complaints.cannot_listen(host, port, wrong, *flags).partition(". ")
                yield Finding("fail", setting, what, remedy[0].lower() + remedy[1:])
        yield NONE_RUNS
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
                      "the gateway started it again; its log has the traceback, which is worth a report")  # fmt: skip
    prompts = running["totals"]["prompts"]
    blind, total = prompts.get("load", 0) + prompts.get("text", 0), sum(prompts.values())
    if total and blind > 0.01 * total:
        yield Finding("warn", "prompts", f"{blind:g} of {total:g} prompts were routed without exact tokens",
                      "its log says why: 'a prompt is routed by load', once a minute for each path; hitherto explain shows one")  # fmt: skip
    for one in running["replicas"]:
        if one["events"] in ("unobserved", "gap"):
            yield Finding("fail", f"events {one['id']}", f"the gateway calls its KV events {one['events']}: its cache is guessed from traffic"
                          f" ({one['events_reason']})",
                          "see the trial of this replica below, and the gateway's log")  # fmt: skip


# By the part of a gateway's status: what the doctor calls it, and what stays in use while its file cannot be used.
_FOLLOWED = {
    "api_keys": ("api keys", "the keys read before stay good, also one that was taken out since"),
    "tls": ("tls", "the certificate read before stays in use"),
}


def _check_files(running: dict[str, Any], known: Collection[str]) -> Iterator[Finding]:
    """What the gateway that runs says of the files that it reads again when they change. The doctor's own settings need
    not name them."""
    for part, (subject, stays) in _FOLLOWED.items():
        why = (running.get(part) or {}).get("problem")
        if why and not any(why in said for said in known):
            yield Finding("fail", subject, f"the gateway that runs cannot use its file: {why}",
                          f"mend it, and it is read again within seconds; until then {stays}")  # fmt: skip


def _taken(host: str, port: int) -> OSError | None:
    """Why nobody could listen there, or None."""
    if port == 0:
        return None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe_socket.bind(where)
            probe_socket.listen(1)
    except OSError as error:
        return error
    return None


def check_launches(settings: Settings) -> Iterator[Finding]:
    """What keeps engines from being launched, as the gateway says it when it starts."""
    try:
        launches(settings)
    except ConfigError as error:
        yield from (
            Finding("fail", "launch", line, "the gateway does not start with that") for line in str(error).splitlines()
        )


def check_no_replicas(settings: Settings) -> Finding:
    if settings.launches:
        alone = [(settings.launch, settings.profile)] if settings.launch else []
        kinds = alone + [(pool.launch, pool.profile) for pool in settings.pools.values()]
        what = ", ".join(f"{count} would be launched with profile {profile}" for count, profile in kinds)
        return Finding("ok", "replicas", f"{what}; run the doctor again when they run")
    return Finding(
        "fail", "replicas", "there is none to send requests to", "give --replica-url http://HOST:PORT, or --launch N"
    )


# --- the model's tokenizer and template


def by_model(replicas: list[tuple[Address, Facts]]) -> list[list[tuple[Address, Facts]]]:
    """Replicas that serve the same base model, in groups."""
    groups: list[tuple[set[str], list[tuple[Address, Facts]]]] = []
    for address, facts in replicas:
        names = set(base_names(facts.models))
        group = next((one for one in groups if one[0] & names or one[0] == names), None)
        if group is None:
            groups.append((set(names), [(address, facts)]))
        else:
            group[0].update(names)
            group[1].append((address, facts))
    return [members for _, members in groups]


def by_files(settings: Settings, group: list[tuple[Address, Facts]]) -> list[list[tuple[Address, Facts]]]:
    """Replicas of one model, those together that were started from the same files as far as these are here."""
    if settings.model or not group:
        return [group]
    variants: dict[Path | None, list[tuple[Address, Facts]]] = {}
    for address, facts in group:
        variants.setdefault(folder_here(facts.root), []).append((address, facts))
    strangers = variants.pop(None, [])
    first, *others = variants.values() or [[]]
    return [first + strangers, *others]


def check_model(
    settings: Settings, facts: list[Facts], one_of_several: bool = False
) -> tuple[str, Path | None, Finding]:
    """(name the replicas serve it by, its folder, what to say)."""
    if one_of_several and settings.model and (here := next((one.root for one in facts if folder_here(one.root)), None)):
        # as the gateway does with models that --model is not for
        settings = settings.model_copy(update={"model": here})
    names = [name for one in facts for name in base_names(one.models)]
    launched = [settings.profile] if settings.launch else [pool.profile for pool in settings.pools.values()]
    simulated = launched[:1] == ["sim"]
    wanted = settings.model or (names[0] if names else "sim" if simulated else None)
    served = settings.served_model_name or (names[0] if names else wanted and Path(wanted).name) or "model"
    roots = () if settings.model else (one.root for one in facts)
    try:
        directory = model_dir(*roots, wanted)
    except ConfigError as error:
        return served, None, Finding("fail", "model", f"prompts would be matched as text, not as tokens: {error}")
    return served, directory, Finding("ok", "model", f"{served}, tokenizer and template from {directory}")


def check_prompts(
    settings: Settings, directory: Path, served: str, facts: list[Facts]
) -> tuple[Pipeline | None, list[Finding]]:
    from gateway.prompt.tokens.model import ModelError
    from gateway.prompt.tokens.tokenizer import TokenizerError

    size = settings.block_size or next((one.block_size for one in facts if one.block_size), 16)
    try:
        pipeline = Pipeline(directory, served, size, chat_template=settings.chat_template)
    except (ModelError, TokenizerError) as error:
        return None, [
            Finding("fail", "tokenizer", str(error), "give --model a folder that holds the model's tokenizer.json")
        ]
    pipeline.follow(next((one.dialect.version_quirks(one.version) for one in facts if one.version), {}))
    return pipeline, [_tokenizer(pipeline), *_files(pipeline), *_template(pipeline)]


def _tokenizer(pipeline: Pipeline) -> Finding:
    if pipeline.tokenizer is None:
        return Finding("warn", "tokenizer", f"{pipeline.template_error}: prompts are routed by load",
                       "nothing to mend if the engine reads this model without tokenizer.json; else give --model a folder that has one")  # fmt: skip
    text = " ".join(WORDS * 70)[:8192]
    begun = time.perf_counter()
    ids = pipeline.tokenizer.encode(text)
    took = f"8 kB in {1e3 * (time.perf_counter() - begun):.2f} ms, {len(ids) // 4} tokens"
    if pipeline.tokenizer.backend == "fastokens":
        return Finding("ok", "tokenizer", f"fastokens, {took}")
    return Finding("warn", "tokenizer", f"{pipeline.tokenizer.backend}, {took}: fastokens cannot load this one",
                   "it works, at about 40 times the cost for each prompt")  # fmt: skip


def _files(pipeline: Pipeline) -> Iterator[Finding]:
    """What the model's files say of prompts that may not be exact."""
    reading = pipeline.reading
    if reading is not None and (doubt := pipeline.inexact()):
        yield Finding("warn", "tokenizer files", f"{doubt}: prompts are matched as text unless the engine's own tokens decide it",
                      "let the gateway ask the engine's /tokenize; the replica's line below says what it answered")  # fmt: skip
    elif reading is not None and reading.rebuilt:
        yield Finding(
            "ok", "tokenizer files", f"transformers does not use tokenizer.json as it is: it is {reading.how}, here too"
        )
    if pipeline.media.images is not None:
        yield Finding(
            "ok",
            "media",
            "images that are written in a request are exact; what is at a URL, sound and video are so up to where they begin",
        )
    elif pipeline.takes_media:
        yield Finding("warn", "media", "the model takes more than text: prompts with media are exact up to the first item, and by text from there on",
                      "nothing to mend; hitherto_media_prompts_total counts them, hitherto explain shows one")  # fmt: skip


def _template(pipeline: Pipeline) -> list[Finding]:
    report = template_report(pipeline)
    if report.refused and pipeline.tokenizer is None:
        return []  # said with the tokenizer
    if report.refused:
        return [Finding("fail", "chat template", f"a plain conversation cannot be rendered: {report.refused}",
                        "give --chat-template the file the engines were started with")]  # fmt: skip
    how = (
        f"by Jinja each time ({report.not_compiled})" if report.not_compiled else "compiled, and checked against Jinja"
    )
    reuse = (
        f"known prefixes end at any of {report.cuts} special tokens" if report.cuts else "nothing of a prompt is reused"
    )
    findings = [Finding("ok", "chat template", f"renders {how}; {reuse}")]
    if report.prints_date:
        findings.append(Finding("warn", "date in the prompt", "the template prints the date: every cached prefix is new after midnight",
                                "nothing to mend in the gateway; a template without the date would keep its cache"))  # fmt: skip
    for turn in report.turns:
        name = "turn by turn" if turn.what == "plain" else f"turns {turn.what}"
        if turn.extends:
            findings.append(Finding("ok", name, "each turn extends the one before, so its cache can be used"))
        else:
            findings.append(Finding("warn", name, f"the second turn keeps only {turn.kept} of the first one's {turn.total} tokens",
                                    "the template rewrites earlier turns; hits end there on any router. Nothing to mend in the gateway"))  # fmt: skip
    return findings


# --- the replicas, as they describe themselves


def known_to(running: dict[str, Any] | None) -> list[Address]:
    """The engines of the running gateway, with the sources of events that it follows and their roles: an older engine
    does not tell the former, and they stand in the gateway's settings alone."""
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
    """Replicas behind this address that the running gateway sends nothing to, by its own words. It remembers what
    was there before; what answers now need not be an engine, and would be misjudged by one look at it."""
    for one in (running or {}).get("replicas", []):
        if one["url"] == address.url and one.get("state") in ("starting", "warming", "failed"):
            yield Finding("fail", f"replica {one['id']}", f"the gateway calls it {one['state']}: {one['reason']}",
                          f"{_remedy_of_silence(one['reason'])}; its other checks are skipped")  # fmt: skip


def _remedy_of_silence(why: str) -> str:
    """What to do about an engine that serves nothing, by what was seen of it."""
    if LATE in why:
        return (
            "it hangs, still loads, or is out of reach. If its port takes connections and its log does not say that it "
            "loads, save `py-spy dump --pid PID` of its process and restart it; else look at its machine and at firewalls"
        )
    return "start it, wait for it to load, or correct its URL"


def check_drained(settings: Settings, address: Address, running: dict[str, Any] | None) -> Iterator[Finding]:
    """Replicas behind this address that were drained and not asked back, in the running gateway's own words."""
    headers = "-H 'content-type: application/json'" + (
        " -H 'authorization: Bearer TOKEN'" if admin_headers(settings) else ""
    )
    for one in (running or {}).get("replicas", []):
        if one["url"] == address.url and one.get("state") == "stopped":
            yield Finding(
                "warn",
                f"replica {one['id']}",
                f"{one['reason']}, {_minutes(one['since_seconds'])} ago: {DRAINED}",
                f"""curl -X POST {admin_url(settings)}/replicas {headers} -d '{{"url": "{one["url"]}"}}'""",
            )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def ended_by_drain(address: Address, running: dict[str, Any] | None) -> bool:
    """Whether the gateway launched this engine and ended it when it was drained, so that none is to be looked for."""
    known = [one for one in (running or {}).get("replicas", []) if one["url"] == address.url]
    return any(one.get("managed") and one.get("state") == "stopped" for one in known)


def check_reached(address: Address, facts: Facts) -> Finding:
    if not facts.serving:
        return Finding(
            "fail",
            f"replica {address.id}",
            facts.error or "does not serve a model",
            "give the URLs of the engines behind that gateway as --replica-url, in place of its own"
            if facts.error == IS_GATEWAY
            else _remedy_of_silence(facts.error),
        )
    cache = f", {facts.num_blocks} blocks of {facts.block_size}" if facts.num_blocks else ""
    bases = base_names(facts.models)
    adapters = [name for name, parent in facts.models.items() if parent]
    more = f", adapters {', '.join(adapters)}" if adapters else ""
    length = f", context {facts.max_model_len}" if facts.max_model_len else ""
    ranks = f", {len(facts.engines)} data-parallel ranks" if len(facts.engines) > 1 else ""
    return Finding(
        "ok",
        f"replica {address.id}",
        f"serves {', '.join(bases) or 'unnamed models'}{more}{cache}{length}{ranks}, version {facts.version or 'unknown'}",
    )


def problems_by_subject(address: Address, facts: Facts) -> dict[str, Problem]:
    return problems_of(facts, address.source, facts.events(address.source), address.role)


def check_own_words(address: Address, facts: Facts) -> Iterator[Finding]:
    """What the engine tells of itself that keeps the gateway from its work; events are for the trial to judge."""
    for name, problem in problems_by_subject(address, facts).items():
        if name in ("models", "metrics", "caching", "tiers", "role"):
            level = "fail" if name == "caching" else "warn"
            subject = "model names" if name == "models" else name
            yield Finding(level, f"{subject} {address.id}", problem.what, problem.remedy)


def check_seen_by_gateway(
    running: dict[str, Any] | None,
    replicas: list[tuple[Address, Facts]],
    untried: Collection[str] = (),
    names: Iterable[twins.Name] = (),
) -> Iterator[Finding]:
    """Problems that only traffic shows, from the gateway that sees it, and those of replicas that only it knows.
    `names`: of the replicas, for `check_twice` says what is to be said of them."""
    known = {str(problem) for address, facts in replicas for problem in problems_by_subject(address, facts).values()}
    known |= {str(problem) for _, problem in twins.complaints(names)}
    for one in (running or {}).get("replicas", []):
        for problem in one.get("problems", []):
            if problem not in known and one.get("url") not in untried and not problem.startswith(DRAINED):
                yield Finding("warn", f"traffic {one['id']}", problem)


def check_models(replicas: list[tuple[Address, Facts]]) -> Finding:
    bases = {address.id: sorted(base_names(facts.models)) for address, facts in replicas}
    if len(set(map(tuple, bases.values()))) == 1:
        return Finding(
            "ok",
            "models",
            f"{'the replica serves' if len(bases) == 1 else f'all {len(bases)} replicas serve'} "
            + (", ".join(next(iter(bases.values()))) or "unnamed models"),
        )
    told = "; ".join(f"{id}: {', '.join(names)}" for id, names in bases.items())
    if count_models(marks(facts.models, facts.root) for _, facts in replicas if facts.models) < 2:
        return Finding(
            "warn",
            "models",
            f"the replicas serve one model by different names ({told}): they share a name or the folder they were started from",
            "a request goes to the replicas that serve the name in it, and to any where it has none; "
            "if that is not meant, start them with the same --served-model-name",
        )
    refused = "" if not all(one.models for _, one in replicas) else ", and a prompt that names none is refused"
    return Finding(
        "warn",
        "models",
        f"the replicas serve different models ({told}): they share neither a name nor the folder they were started from",
        f"each model is routed among its own replicas{refused}; if that is not meant, correct --replica-url",
    )


def check_twice(names: Iterable[twins.Name]) -> Iterator[Finding]:
    """Engines that are given under several names."""
    for found in twins.find(names):
        said = twins.complaint(found, found.names[0])
        yield Finding("warn", f"twice {found.names[0]}"[:60], said.what, said.remedy)


def check_roles(replicas: list[Replica]) -> Finding | None:
    """Whether prompts can be computed on one replica and answered by another, where that is wanted."""
    roles = [one.role for one in replicas]
    if set(roles) == {BOTH}:
        return None
    if what := lacks(set(roles)):
        return Finding("fail", "roles", what, REMEDY)
    if what := unlike((one.role, None if one.transfer is None else one.transfer.name) for one in replicas):
        return Finding("fail", "roles", what, SPEAK_ALIKE)
    counted = ", ".join(f"{roles.count(role)} {role}" for role in sorted(set(roles)))
    found, pairs, untold = [], 0, dict[str, None]()
    for way in dict.fromkeys(one.transfer for one in replicas if one.transfer is not None):
        alike = [one for one in replicas if one.transfer is way]
        computing, writing = pairing.sides_of(way, alike, lambda one: one)
        found += pairing.complaints(computing, writing, way)
        untold |= dict.fromkeys(
            name for name in way.compares if any(getattr(one.traits, name) is None for one in alike)
        )
        pairs += sum(bool(first and second) for first, second in pairing.groups(computing, writing, way))
    if found:
        left = counted if pairs else "no pair is left, so no prompt is computed on one replica and answered by another"
        remedies = [one.lacking.dialect.remedies.transfer if one.lacking else pairing.REMEDY for one in found]
        said = "; ".join(one.text for one in found)
        return Finding("warn" if pairs else "fail", "roles", f"{left}: {said}", "; ".join(dict.fromkeys(remedies)))
    said = f"{counted}: prompts can be computed on one replica and answered by another"
    if untold:
        said += f", as far as they tell: not {', '.join(untold)}, which have to be alike as well; the transfer below tries that"
    return Finding("ok", "roles", said)


def check_block_size(settings: Settings, replicas: list[tuple[Address, Facts]]) -> Finding:
    sizes = {address.id: facts.block_size for address, facts in replicas if facts.block_size}
    if settings.block_size and set(sizes.values()) - {settings.block_size}:
        return Finding("fail", "block size", f"set to {settings.block_size}, but the replicas say {sizes}: no block would ever match",
                       "leave --block-size out; it is learned from the replicas")  # fmt: skip
    if len(set(sizes.values())) > 1:
        return Finding("warn", "block size", f"differs between replicas of one model: {sizes}. They are variants, and each prompt is prepared for both",
                       "start them all with the same --block-size; of more than two variants the rest is chosen by load alone")  # fmt: skip
    if sizes:
        return Finding(
            "ok",
            "block size",
            f"{next(iter(sizes.values()))} tokens on {'every replica' if len(sizes) == len(replicas) else ', '.join(sizes)}",
        )
    if settings.block_size:
        return Finding("ok", "block size", f"{settings.block_size} tokens, as set; the replicas do not tell")
    return Finding(
        "warn",
        "block size",
        "no replica tells it, so the usual 16 is assumed",
        "give --block-size as the engines were started with",
    )


def check_hash_seeds(replicas: list[tuple[Address, Facts]]) -> Finding | None:
    """Whether engines that look for blocks in slower tiers, which they may share, name a block alike."""
    tiered = [(address.id, facts) for address, facts in replicas if facts.scrape and facts.scrape.external_queries]
    random = [id for id, facts in tiered if facts.dialect.has_random_hash_seed(facts.version)]
    if len(tiered) < 2 or not random:
        return None
    return Finding("warn", "hash seeds", f"this release names blocks by a seed that is random in each process: what {', '.join(random)} put into "
                   "a tier that replicas share, no other finds",
                   "start all with the same PYTHONHASHSEED, or a newer release; nothing to mend if each has a tier of its own")  # fmt: skip


def check_context(replicas: list[tuple[Address, Facts]]) -> Finding:
    lengths = {address.id: facts.max_model_len for address, facts in replicas if facts.max_model_len}
    names = ", ".join(sorted({name for _, facts in replicas for name in base_names(facts.models)})) or "the model"
    if not lengths:
        return Finding("ok", "context", f"no replica of {names} tells its length; prompts are not checked for it")
    if len(set(lengths.values())) > 1:
        return Finding("warn", "context", f"differs between replicas of {names}: {lengths}. Longer prompts go only to those that have room",
                       "start them all with the same --max-model-len if that is not meant")  # fmt: skip
    return Finding("ok", "context", f"{next(iter(lengths.values()))} tokens on every replica of {names}")


def check_variants(running: dict[str, Any] | None, continues: bool = False) -> Iterator[Finding]:
    """What the running gateway tells apart: more than a look from here shows, since it knows what each engine was
    started from. `continues`: whether it goes on with streams that break off."""
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
            more += "; both legs of a request are at replicas of one of them"
            more += ", those that prompts are not prepared for have none" if len(told) > 2 else ""
        if continues:
            more += "; a stream that breaks off is gone on with by a replica of its own variant alone"
        yield Finding("warn", f"variants {name}"[:60], f"the gateway tells {len(told)} apart: {' | '.join(told)}{more}",
                      "nothing to mend during an upgrade; restart the engines that are behind so that all are alike")  # fmt: skip


async def check_clock(ways: dict[str, Access]) -> Finding:
    """The replicas' Date headers against this machine's clock."""
    skews: dict[str, float] = {}
    for id, way in ways.items():
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            before = time.time()
            async with way.session.get(way.url + "/health", timeout=aiohttp.ClientTimeout(5)) as response:
                then = parsedate_to_datetime(response.headers["Date"]).timestamp()
            skews[id] = max(then - time.time(), before - then - 1, 0.0)  # the header is cut to whole seconds
    wrong = {id: skew for id, skew in skews.items() if skew > SKEW_SECONDS}
    if wrong:
        told = ", ".join(f"{id} by {skew:.0f} s" for id, skew in wrong.items())
        return Finding(
            "warn",
            "clock",
            f"differs from the replicas' clocks: {told}",
            "routing does not depend on it, but logs and metrics do: run NTP on all machines",
        )
    return Finding(
        "ok",
        "clock",
        f"agrees with {len(skews)} of {len(ways)} replicas"
        if skews
        else "no replica tells the time; nothing to compare",
    )
