"""The checks of `hitherto doctor` on engines: on each one, on all of them, and on those of one model with its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.model import folder_here, model_dir
from gateway.ops.findings import Finding, fail, ok, warn
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.report import template_report
from gateway.settings import ConfigError, Settings, admin_headers, admin_url, read_engine_key
from replicas import pairing
from replicas.access import PROBE_SECONDS, Access
from replicas.adopt import IS_GATEWAY, Facts, described, problems_of
from replicas.duplicates import Name, duplicate
from replicas.lifecycle import TAKES_TRAFFIC, State
from replicas.problems import DRAINED, Problem
from replicas.replica import Address, Replica, bearer, parse_url
from replicas.roles import BOTH, REMEDY, SPEAK_ALIKE, lacks, unlike
from replicas.served import base_names, count_models, marks
from replicas.tls import context_for

ENDING = (State.LEAVING, State.DRAINING)
NOT_IN_USE = {*State} - {*TAKES_TRAFFIC}
KEPT_OUT = NOT_IN_USE - {State.STOPPED}  # states in which the gateway sends an engine nothing new
# Parts of the texts of those problems that make a replica's whole cache unusable.
CACHE_UNUSED = ("prefix caching is off", "its KV events cannot be matched with prompts", "KV events are not followed")
WORDS = "river lantern copper meadow orbit velvet anchor thistle marble ember willow saddle quartz harbor nimbus tinder".split()


@dataclass
class Engine:
    """One engine to check.

    `facts`: what the engine reports of itself. `known`: the entries of its replicas in a running gateway's status.
    """

    settings: Settings
    address: Address
    known: Sequence[Mapping[str, Any]]
    facts: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        self.tls, self.key = context_for(self.address.url, self.settings.replica_ca), read_engine_key(self.settings)
        self.way = Access(self.address.url, self.address.host, self.tls, self.address.source, bearer(self.key))

    @property
    def id(self) -> str:
        return self.address.id

    @property
    def is_left_out(self) -> bool:
        """Whether the doctor does not ask the engine anything, because the running gateway does not use it now.

        The gateway has observed this address for some time, and the doctor looks only once: it could misjudge what
        answers there now, which may be no engine. An engine that an operator has drained is asked, unless the gateway
        launched it.
        """
        return any(one.get("state") in (NOT_IN_USE if one.get("managed") else KEPT_OUT) for one in self.known)

    async def ask(self) -> None:
        """Ask the engine for its models, version and other facts, and set `facts`."""
        self.facts = await self.way.find(PROBE_SECONDS)
        if self.facts.serving:
            self.address = self.address._replace(source=self.way.events)

    @property
    def name(self) -> Name:
        created = self.facts.scrape.created if self.facts.scrape else None
        return Name(self.id, self.way.address, self.address.port, created)

    @property
    def replicas(self) -> list[Replica]:
        """The engine's replicas, one for each data-parallel rank, as a gateway would have them."""
        found = described(self.address, self.facts)
        for one in found:
            one.address, one.tls, one.key = self.way.address, self.tls, self.key
        return found

    @cached_property
    def problems(self) -> dict[str, Problem]:
        """The problems that the engine's own facts show, by subject, such as "block size"."""
        facts, source = self.facts, self.address.source
        more = {"name": self.way.problem, "block size": facts.unfit(self.settings.block_size, source)}
        return problems_of(facts, source, facts.events(source)) | {name: one for name, one in more.items() if one}


def replica(engine: Engine) -> Iterator[Finding]:
    """Report why the running gateway does not use the engine, or else what the engine serves."""
    for one in engine.known:
        state, subject = one.get("state"), f"replica {one['id']}"
        if state in KEPT_OUT:
            said, level = f"the gateway calls it {state}: {one['reason']}", warn if state in ENDING else fail
            yield level(said, f"{_remedy_of_kept_out(one)}; its other checks are skipped", subject)
        elif state == State.STOPPED:
            token = " --admin-token @FILE" if admin_headers(engine.settings) else ""
            command = f"hitherto replicas add {one['url']} --admin {admin_url(engine.settings)}{token}"
            yield warn(f"{one['reason']}, {one['since_seconds']:.0f} s ago: {DRAINED}", command, subject)
    facts = engine.facts
    if engine.is_left_out:
        return
    if not facts.serving:
        remedy = "give the URLs of the engines behind that gateway as --replica-url, in place of its own"
        remedy = remedy if facts.error == IS_GATEWAY else _remedy_of_silence(facts.fault, engine.address.port)
        yield fail(facts.error or "does not serve a model", remedy)
        return
    adapters = [name for name, parent in facts.models.items() if parent]
    parts = (
        ", ".join(base_names(facts.models)) or "unnamed models",
        adapters and f"adapters {', '.join(adapters)}",
        facts.num_blocks and f"{facts.num_blocks} blocks of {facts.block_size}",
        facts.max_model_len and f"context {facts.max_model_len}",
        len(facts.engines) > 1 and f"{len(facts.engines)} data-parallel ranks",
        f"version {facts.version or 'unknown'}",
    )
    yield ok(f"serves {', '.join(part for part in parts if part)}")


def _remedy_of_kept_out(entry: Mapping[str, Any]) -> str:
    if entry["state"] in ENDING:
        drained = entry["state"] == State.DRAINING
        again = f"hitherto replicas add {entry['url']}" if drained else "start it when it has ended"
        return f"nothing, it finishes the {entry.get('inflight', 0)} requests that it has; to use it again, {again}"
    if entry.get("managed") and entry.get("fault") != "timeout":
        return "the gateway starts it by itself, and again whenever it ends: wait for it to load, or see why it ended in the gateway's log"
    return _remedy_of_silence(entry.get("fault"), parse_url(entry["url"]).port)


def _remedy_of_silence(fault: str | None, port: int) -> str:
    """Return what to do about an engine that serves nothing.

    `fault`: the kind of failure, such as "refused", or None. `port`: the port in the engine's URL.
    """
    return {
        "refused": f"another program may listen there, which `ss -ltnp 'sport = :{port}'` on its machine names; start the "
                   "engine on a free port, or correct its URL",
        "timeout": "it hangs, still loads, or is out of reach. If its port takes connections and its log does not say that "
                   "it loads, save `py-spy dump --pid PID` of its process and restart it; else look at its machine and at firewalls",
    }.get(fault or "", "start it, wait for it to load, or correct its URL")  # fmt: skip


def own_words(engine: Engine) -> Iterator[Finding]:
    """Report the problems of an engine that need no trial.

    If a running gateway knows the engine, they are those in the gateway's status, in its own words. Otherwise they are
    those that the engine's facts show.
    """
    if engine.is_left_out or not (engine.known or engine.facts.serving):
        return
    for one in engine.known:
        subject = f"traffic {one['id']}"
        if slow := one.get("slow"):
            yield warn(slow["text"], subject=subject)
        for problem in one.get("problems", ()):
            if not problem.startswith(DRAINED):  # `replica` has said so
                yield _by_weight(problem, "", subject)
        if one.get("events") == "gap":
            said = "the gateway calls its KV events gap: its cache is guessed from traffic"
            remedy = "see the trial of this replica below, and the gateway's log"
            yield fail(f"{said} ({one.get('events_reason')})", remedy, f"events {one['id']}")
    for name, found in () if engine.known else engine.problems.items():
        if name not in ("events", "ranks", "replay"):  # which the trial judges
            yield _by_weight(*found, f"{'model names' if name == 'models' else name} {engine.id}")


def _by_weight(what: str, remedy: str, subject: str) -> Finding:
    """Return a finding about a problem: a failure if it makes the replica's whole cache unusable, else a warning.

    `what`: the problem, in words. `remedy`: what to do about it. `subject`: what the line in the report is about.
    """
    return (fail if any(one in what for one in CACHE_UNUSED) else warn)(what, remedy, subject)


@dataclass
class Engines:
    """All engines that serve a model.

    `is_none_known`: whether the settings and the running gateway name no engine at all. It is False if a file or a
    service that could name engines could not be read.
    """

    settings: Settings
    serving: list[Engine]
    is_none_known: bool = False


def no_replicas(engines: Engines) -> Iterator[Finding]:
    """Report if no replica is known: ok if the settings launch engines, else a failure."""
    settings = engines.settings
    if engines.is_none_known and settings.launches:
        kinds = [(one.launch, one.profile) for one in (settings, *settings.pools.values())]
        what = ", ".join(f"{count} would be launched with profile {profile}" for count, profile in kinds if count)
        yield ok(f"{what}; run the doctor again when they run")
    elif engines.is_none_known:
        yield fail("there is none to send requests to")


def models(engines: Engines) -> Iterator[Finding]:
    """Check that the replicas serve the same models by the same names."""
    serving = engines.serving
    naming = [one for one in serving if base_names(one.facts.models)] or serving
    names = {one.id: ", ".join(sorted(base_names(one.facts.models))) for one in naming}
    told = "; ".join(f"{id}: {some}" for id, some in names.items())
    if len(set(names.values())) == 1:
        many = f"all {len(names)} replicas that {'tell a model' if len(naming) < len(serving) else 'answer'} serve"
        who = "the replica serves" if len(serving) == 1 else many
        yield ok(f"{who} {next(iter(names.values())) or 'unnamed models'}")
    elif serving and count_models(marks(one.facts.models, one.facts.root) for one in serving if one.facts.models) < 2:
        yield warn(
            f"the replicas serve one model by different names ({told}): they share a name or the folder they were started from",
            "a request goes to the replicas that serve the name in it, and to any where it has none; "
            "if that is not meant, start them with the same --served-model-name",
        )
    elif serving:
        refused = ", and a prompt that names none is refused" if all(one.facts.models for one in serving) else ""
        yield warn(
            f"the replicas serve different models ({told}): they share neither a name nor the folder they were started from",
            f"each model is routed among its own replicas{refused}; if that is not meant, correct --replica-url",
        )


def duplicates(engines: Engines) -> Iterator[Finding]:
    """Warn of each engine that is, or may be, given under several names, since it would count as several replicas.

    Engines that a running gateway knows are left out: its status reports such problems itself.
    """
    names, reported = [one.name for one in engines.serving], {one.id for one in engines.serving if one.known}
    for one in names:
        problem, others = duplicate(one, names)
        if one.id not in reported and problem is not None:
            yield warn(problem.what, problem.remedy, f"twice {one.id}"[:60])
            reported.update(others)


@dataclass
class Model:
    """The engines of one model."""

    engines: list[Engine]

    @property
    def names(self) -> str:
        return ", ".join(sorted({name for one in self.engines for name in base_names(one.facts.models)})) or "the model"


def by_model(serving: Iterable[Engine]) -> list[list[Engine]]:
    """Return the engines in groups that serve the same base model.

    Some engines report no model. If all others serve one model, they join these, since the gateway sends them requests
    for that model too. Otherwise they are a group of their own.
    """
    groups: list[tuple[set[str], list[Engine]]] = []
    for engine in sorted(serving, key=lambda one: not base_names(one.facts.models)):
        names = set(base_names(engine.facts.models))
        alike = (one for one in groups if one[0] & names or one[0] == names or (not names and len(groups) == 1))
        if (group := next(alike, None)) is None:
            groups.append(group := (set(), []))
        group[0].update(names)
        group[1].append(engine)
    return [members for _, members in groups]


def block_sizes(model: Model) -> Iterator[Finding]:
    """Check that the replicas of a model have the same block size.

    `own_words` compares it with the block size in the settings.
    """
    sizes = {one.id: one.facts.block_size for one in model.engines if one.facts.block_size}
    given = model.engines[0].settings.block_size
    if any("block size" in one.problems and not one.known for one in model.engines):
        return
    if len(set(sizes.values())) > 1:
        yield warn(
            f"differs between replicas of {model.names}: {_each(sizes)}. They are variants, and each prompt is prepared for both",
            "start them all with the same --block-size; of more than two variants the rest is chosen by load alone",
        )
    elif sizes:
        where = "every replica" if len(sizes) == len(model.engines) else ", ".join(sizes)
        yield ok(f"{next(iter(sizes.values()))} tokens on {where} of {model.names}")
    elif given:
        yield ok(f"{given} tokens, as set; the replicas of {model.names} do not tell")
    else:
        said = f"no replica of {model.names} tells it, so the usual 16 is assumed"
        yield warn(said, "give --block-size as the engines were started with")


def _each(told: Mapping[str, int]) -> str:
    """Return each replica's value as text: `gpu1:8000 16, gpu2:8000 32`."""
    return ", ".join(f"{id} {value}" for id, value in told.items())


def hash_seeds(model: Model) -> Iterator[Finding]:
    """Warn if engines whose slower cache tiers may be shared hash their blocks with a random seed.

    The seed differs between processes, so one engine does not find the blocks that another has put into a shared tier.
    """
    tiered = [one for one in model.engines if one.facts.scrape and one.facts.scrape.external_queries]
    random = [one.id for one in tiered if one.facts.dialect.has_random_hash_seed(one.facts.version)]
    if len(tiered) > 1 and random:
        yield warn(
            f"engines of {model.names} name blocks in this release by a seed that is random in each process: what "
            f"{', '.join(random)} put into a tier that replicas share, no other finds"
        )


def contexts(model: Model) -> Iterator[Finding]:
    """Check that the replicas of a model have the same context length."""
    lengths = {one.id: one.facts.max_model_len for one in model.engines if one.facts.max_model_len}
    if not lengths:
        yield ok(f"no replica of {model.names} tells its length; prompts are not checked for it")
    elif len(set(lengths.values())) > 1:
        told = f"differs between replicas of {model.names}: {_each(lengths)}"
        yield warn(f"{told}. Longer prompts go only to those that have room")
    else:
        yield ok(f"{next(iter(lengths.values()))} tokens on every replica of {model.names}")


def roles(model: Model) -> Iterator[Finding]:
    """Check, if replicas have roles, whether prompts can be prefilled on one replica and decoded on another."""
    ones = [one for engine in model.engines for one in engine.replicas]
    own = [one.role for one in ones]
    if set(own) == {BOTH}:
        return
    names = ((one.role, None if one.transfer is None else one.transfer.name) for one in ones)
    for what, remedy in ((lacks(set(own)), REMEDY), (unlike(names), SPEAK_ALIKE)):
        if what:
            yield fail(f"of {model.names}: {what}", remedy)
            return
    found, pairs, untold = [], 0, dict[str, None]()
    for way in dict.fromkeys(one.transfer for one in ones if one.transfer is not None):
        alike = [one for one in ones if one.transfer is way]
        sides = pairing.sides_of(way, alike, lambda one: one)
        found += pairing.complaints(*sides, way)
        untold |= {name: None for name in way.compares if any(getattr(one.traits, name) is None for one in alike)}
        pairs += sum(bool(first and second) for first, second in pairing.groups(*sides, way))
    said = f"{', '.join(f'{own.count(role)} {role}' for role in sorted(set(own)))} of {model.names}"
    if found:
        if not pairs:
            said = f"no pair of {model.names} is left, so no prompt is computed on one replica and answered by another"
        remedies = [one.lacking.dialect.remedies.transfer if one.lacking else pairing.REMEDY for one in found]
        said = f"{said}: {'; '.join(one.text for one in found)}"
        yield (warn if pairs else fail)(said, "; ".join(dict.fromkeys(remedies)))
        return
    said += ": prompts can be computed on one replica and answered by another"
    if untold:
        said += f", as far as they tell: not {', '.join(untold)}, which have to be alike as well; the transfer below tries that"
    yield ok(said)


class ModelFiles:
    """The tokenizer and template files of a model, for the engines that were started from them.

    `served`: the name by which the engines serve the model. `pipeline`: turns requests into tokens and block hashes as
    a gateway does; None if it cannot be made, for the reason in `unusable`.
    """

    def __init__(self, settings: Settings, engines: list[Engine], is_one_of_several: bool):
        """Find and read the files.

        `engines`: the engines that serve the model. `is_one_of_several`: whether there are other models too. --model
        then applies only if this model has no folder on this machine.
        """
        from gateway.prompt.tokens.model import ModelError
        from gateway.prompt.tokens.tokenizer import TokenizerError

        facts = [one.facts for one in engines]
        here = next((one.root for one in facts if folder_here(one.root)), None) if is_one_of_several else None
        given = settings.model and (here or settings.model)  # as the gateway does for other models than --model
        names = [name for one in facts for name in base_names(one.models)]
        launched = [settings.profile] if settings.launch else [pool.profile for pool in settings.pools.values()]
        wanted = given or (names[0] if names else "sim" if launched[:1] == ["sim"] else None)
        self.served = settings.served_model_name or (names[0] if names else wanted and Path(wanted).name) or "model"
        self.pipeline: Pipeline | None = None
        self.directory: Path | None = None
        self.unusable = ""
        try:
            self.directory = model_dir(*(() if given else (one.root for one in facts)), wanted)
            size = settings.block_size or next((one.block_size for one in facts if one.block_size), 16)
            self.pipeline = Pipeline(self.directory, self.served, size, chat_template=settings.chat_template)
            self.follow(next((one for one in facts if one.version), None))
        except (ConfigError, ModelError, TokenizerError) as error:
            self.unusable = str(error)

    def follow(self, facts: Facts | None) -> None:
        """Make prompts as engines of the version in `facts` do; with None, as engines of the newest version do."""
        if self.pipeline is not None:
            self.pipeline.follow(facts.dialect.version_quirks(facts.version) if facts is not None else {})


def by_files(settings: Settings, engines: list[Engine]) -> list[list[Engine]]:
    """Return the engines of one model in groups that were started from the same files.

    Engines whose files are not on this machine join the first group.
    """
    found: dict[Path | None, list[Engine]] = {}
    for one in engines:
        found.setdefault(None if settings.model else folder_here(one.facts.root), []).append(one)
    strangers = found.pop(None, [])
    first, *others = found.values() or [[]]
    return [first + strangers, *others]


def tokenizer(files: ModelFiles) -> Iterator[Finding]:
    """Check that the model's files exist, and that its tokenizer can be read by the fast library."""
    if files.directory is None:
        yield fail(f"prompts would be matched as text, not as tokens: {files.unusable}", subject="model")
        return
    yield ok(f"{files.served}, tokenizer and template from {files.directory}", subject="model")
    if files.pipeline is None:
        yield fail(files.unusable, "give --model a folder that holds the model's tokenizer.json")
    elif (own := files.pipeline.tokenizer) is None:
        remedy = "nothing to mend if the engine reads this model without tokenizer.json; else give --model a folder that has one"
        yield warn(f"{files.pipeline.template_error}: prompts are matched as text", remedy)
    else:
        slow = f"read by {own.backend}: fastokens cannot load this one"
        remedy = "it works, at about 40 times the cost for each prompt"
        yield ok("read by fastokens") if own.backend == "fastokens" else warn(slow, remedy)


def exactness(files: ModelFiles) -> Iterator[Finding]:
    """Warn of kinds of prompts whose tokens may not be exact, as far as the model's files show that."""
    if (pipeline := files.pipeline) is None:
        return
    doubt, reading = pipeline.inexact(), pipeline.reading
    if reading is not None and doubt:
        said = f"{doubt}: prompts are matched as text unless the engine's own tokens decide it"
        yield warn(said, "let the gateway ask the engine's /tokenize; the replica's line below says what it answered")
    if not doubt and not pipeline.must_be_shown and (why := pipeline.inexact_chat()):
        yield warn(f"{why}: they are matched as text", "run a newer version of the engine", "chats")
    if pipeline.takes_media and pipeline.media.family is None:
        said = "the model takes more than text: prompts with media are exact up to the first item, and by text from there on"
        yield warn(
            said, "nothing to mend; hitherto_media_prompts_total counts them, hitherto explain shows one", "media"
        )


def chat_template(files: ModelFiles) -> Iterator[Finding]:
    """Check that conversations can be rendered, and that each turn's prompt extends the prompt of the turn before."""
    if files.pipeline is None or files.pipeline.tokenizer is None:
        return  # `tokenizer` has said why
    report = template_report(files.pipeline)
    if report.refused:
        remedy = "give --chat-template the file the engines were started with"
        yield fail(f"a plain conversation cannot be rendered: {report.refused}", remedy)
        return
    how = (
        f"by Jinja each time ({report.not_compiled})" if report.not_compiled else "compiled, and checked against Jinja"
    )
    reuse = (
        f"known prefixes end at any of {report.cuts} special tokens" if report.cuts else "nothing of a prompt is reused"
    )
    yield ok(f"renders {how}; {reuse}")
    if report.prints_time or report.prints_date:
        what = "time" if report.prints_time else "date"
        said = f"the template prints the {what} in some conversations: their cache ends where it changes"
        remedy = f"nothing to mend in the gateway; a template without the {what} would keep its cache"
        yield warn(said, remedy, f"{what} in the prompt")
    for turn in report.turns:
        name = "turn by turn" if turn.what == "plain" else f"turns {turn.what}"
        kept = f"the second turn keeps only {turn.kept} of the first one's {turn.total} tokens"
        remedy = "the template rewrites earlier turns; hits end there on any router. Nothing to mend in the gateway"
        extends = ok("each turn extends the one before, so its cache can be used", subject=name)
        yield extends if turn.extends else warn(kept, remedy, name)
