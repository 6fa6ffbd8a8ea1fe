"""`loadgen simulate`: play a workload on a simulated fleet in virtual time, once per routing policy."""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter

from rich.console import Console

import policies
from loadgen import options
from loadgen.drive.records import Record
from loadgen.report import files, seeds, show
from loadgen.report.summary import Report, exit_code, setting, spread, summarise
from loadgen.workload import datasets, limits
from loadgen.workload.conversations import Workload
from policies import Slo
from policies.classes import NO_LIMITS
from replicas.simulated.pools import read_pools
from replicas.simulated.profile import Profile, load_profile

from . import rules
from .links import Network
from .run import Outcome, simulate
from .setting import Outage, Setting

_REPLICAS = 8
_WRITTEN = ("--json", "--result-filename", "--html", "--csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    options.flags(
        group,
        ("--policies --policy", partial(options.names, known=rules.NAMES, hint=rules.HINT), "A,B", [policies.DEFAULT],
         f"any of {', '.join(rules.NAMES)}, or {policies.FORM} for your own{rules.HINT} (default {policies.DEFAULT})"),
        ("--replicas", options.whole, "N", None, f"simulated engines (default {_REPLICAS})"),
        ("--profile", str, "NAME|FILE", "gpu-8b", "how fast and how large an engine is: gpu-8b, cpu-tiny or a YAML file (default %(default)s)"),
        ("--num-blocks", options.whole, "N", None, "KV blocks of an engine; where a profile has decode times by the share of the cache in use, as gpu-8b, more "
         "of them also make it faster (default: the profile's)"),
        ("--cpu-blocks", options.whole, "N", None, "KV blocks that an engine keeps in host memory (default: 0)"),
        ("--speeds", _speeds, "X,X", None, "engines run so many times as fast as the profile says, in turn: 1,0.5 makes every other one half as fast"),
        ("--outage", [_outage], "REPLICA:FROM[:TO]", [],
         "lose a replica (from 0) at a second of the run, and have it back, empty, at another; may be repeated"),
    )  # fmt: skip
    _add_legs(parser.add_argument_group("two legs (the prompt computed by one engine, the answer written by another)"))
    group = parser.add_argument_group("gateways")
    options.flags(
        group,
        ("--gateways", options.whole, "N", 1, "gateways, each with a map and costs of its own; requests come to them at random (default %(default)s)"),
        ("--own-ledgers", None, None, False, "gateways do not know of each other's load (default: as with Redis)"),
        ("--admission", ("wait", "reject"), None, None,
         "what gateways do with requests that no engine has room for: let them wait, or refuse them; by the limits of --goodput "
         "(default: they send all at once)"),
    )  # fmt: skip
    options.flags(
        group.add_mutually_exclusive_group(),
        ("--event-delay", options.seconds, "S", 0.005, "from an engine's step to the maps (default %(default)g)"),
        ("--no-events", None, None, False, "engines publish none; gateways model their caches"),
    )
    options.flags(
        group,
        ("--event-loss", options.share, "SHARE", 0.0, "of the batches of events; what is lost comes with the next one, by replay (default %(default)g)"),
        ("--pulls", None, None, False, "engines fetch prompts from one another's host memory where that costs less"),
        ("--client-max-tokens", limits.CLIENTS, None, "mixed",
         "the max_tokens that gateways see: none, exactly each reply's length, as `loadgen run` sends it, or what clients send: a third each none, "
         "a round number above all, a bound near their own replies (default %(default)s)"),
    )  # fmt: skip
    datasets.add_workload(parser, simulated=True)
    datasets.add_seeds(parser)
    files.add_report(parser)


def _add_legs(group: argparse._ArgumentGroup) -> None:
    default = Network()
    options.flags(
        group,
        ("--pools", str, "YAML", None, "kinds of engine, not --replicas: {NAME: {launch: N, role: prefill|decode|both, profile: NAME|FILE, speed: X}}"),
        ("--legs", str, "RULE", "seconds", f"when a request has two: {', '.join(rules.LEG_NAMES)} (default %(default)s, the gateway's)"),
        ("--link-gbit-per-s", options.positive, "X", default.gbit_per_s, "bandwidth of an engine's network card, each way (default %(default)g)"),
        ("--transfer-latency", options.seconds, "S", default.fixed, "what each transfer takes beside its bytes (default %(default)g)"),
        ("--kv-lease", options.positive, "S", default.lease, "how long a computed prompt is kept for another engine (default %(default)g)"),
        ("--itl", None, None, False, "keep the times between tokens, of all streams"),
    )  # fmt: skip


def _speeds(text: str) -> list[float]:
    return [options.positive(part) for part in text.split(",")]


def _outage(text: str) -> Outage:
    replica, *times = text.split(":")
    if not replica.isdecimal() or len(times) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r}: expected REPLICA:FROM or REPLICA:FROM:TO, as in 0:60:120")
    outage = Outage(int(replica), *map(options.seconds, times))
    if outage.until is not None and outage.until <= outage.at:
        raise argparse.ArgumentTypeError(f"{text!r}: it can't be back before it is lost")
    return outage


def fleet_of(args: argparse.Namespace) -> tuple[list[Profile], list[str] | None]:
    """Return the profile of each engine, and the role of each if --pools gives roles, else None. Raises BadOption."""
    options.refuse((args.pools is not None and (args.replicas is not None or args.speeds is not None),
                    "--pools says how many engines there are and how fast: leave --replicas and --speeds out"))  # fmt: skip
    changes, roles = {"num_blocks": args.num_blocks, "cpu_blocks": args.cpu_blocks}, None
    try:
        if args.pools is not None:
            pools = [pool for pool in read_pools(args.pools, args.profile, changes) for _ in range(pool.launch)]
            found, roles = [pool.profile for pool in pools], [pool.role for pool in pools]
        else:
            profile = load_profile(args.profile, **changes)
            kinds = [replace(profile, speedup=profile.speedup * speed) for speed in args.speeds or [1.0]]
            found = [kinds[index % len(kinds)] for index in range(args.replicas or _REPLICAS)]
    except ValueError as error:
        raise options.BadOption(f"--{'profile' if args.pools is None else 'pools'}: {error}") from None
    windows = [profile.name for profile in found if profile.windows]
    options.refuse(
        (windows, f"--profile {windows and windows[0]}: engines with windows are not simulated, drive a real gateway")
    )
    return found, roles


def settings(args: argparse.Namespace) -> dict[str, Setting]:
    """Return a fleet's setting for each policy, by name; they differ in the policy alone. Raises BadOption."""
    engines, roles = fleet_of(args)
    beyond = [outage.replica for outage in args.outage if outage.replica >= len(engines)]
    oracles = [name for name in args.policies if name.startswith("oracle")]
    options.refuse(
        (beyond, f"--outage {beyond and beyond[0]}: there are replicas 0 to {len(engines) - 1}"),
        (args.pulls and not all(profile.cpu_blocks for profile in engines),
         "--pulls needs engines with host memory: give --cpu-blocks, or a profile that has them"),
        (roles is not None and oracles,
         f"--policies {oracles and oracles[0]}: an oracle knows nothing of legs, leave --pools or the oracle out"),
    )  # fmt: skip
    try:
        rules.make_legs(args.legs)
    except ValueError as error:
        raise options.BadOption(f"--legs: {error}") from None
    same = ("seed", "gateways", "event_loss", "users", "max_concurrency", "admission", "legs", "pulls")
    made = Setting(
        policy="",
        profiles=engines,
        **{name: getattr(args, name) for name in same},
        shared_ledger=not args.own_ledgers,
        event_delay=None if args.no_events else args.event_delay,
        outages=args.outage,
        engine_replies=args.replies == "engine",
        salt=datasets.salt(args),
        vocabulary=args.vocab_size,
        slo=_limits(args),
        roles=roles,
        network=Network(args.link_gbit_per_s, args.transfer_latency, args.kv_lease),
        timed=args.itl,
    )
    return {policy: replace(made, policy=policy) for policy in args.policies}


def _limits(args: argparse.Namespace) -> Slo:
    """Return the limits of TTFT and TPOT, in seconds, by which requests are admitted. Raises BadOption."""
    if args.admission is None:
        return NO_LIMITS
    given = files.slo(args)
    if given is None or not given.keys() <= {"ttft", "tpot"}:
        raise options.BadOption("--admission needs limits to admit by, like --goodput ttft:2s,tpot:50ms")
    return Slo(*[given[name] / 1e3 if name in given else None for name in ("ttft", "tpot")])


async def simulate_verb(args: argparse.Namespace, console: Console) -> int:
    files.check(args)
    datasets.check(args)
    fleets = settings(args)
    found: dict[str, list[Report]] = {policy: [] for policy in fleets}
    records: dict[str, list[Record]] = {}
    workload: dict[str, object] = {}
    with interruptible(console):
        for one in datasets.of_seeds(args):
            work, began = datasets.workload(one), perf_counter()
            limits.set_limits(work.conversations, one.client_max_tokens, one.seed)
            if not workload:
                show.print_notes(console, work.notes)
                workload = datasets.describe(one, work)
            for policy, outcome in zip(fleets, played(work, list(settings(one).values()), one.processes)):
                found[policy].append(report_of(one, fleets[policy], outcome))
                label = seeds.label(policy, one.seed, one.seeds)
                records[label] = outcome.done
                console.print(
                    f"[dim]{label}: {len(outcome.done):,} requests, {outcome.ended:,.1f} s of virtual time, "
                    f"{perf_counter() - began:,.1f} s after the start[/]"
                )
    reports = {policy: seeds.merged(of_seeds) for policy, of_seeds in found.items() if of_seeds}
    if not reports:
        return options.INTERRUPTED
    about = {
        "workload": workload,
        "fleet": described(args, next(iter(fleets.values()))),
        "setting": setting(["loadgen", *asked(sys.argv[1:])], args.seed, args.seeds),
    }
    files.conclude(args, reports, records, console, about)
    return exit_code(reports.values(), len(records) == len(fleets) * args.seeds)


def report_of(args: argparse.Namespace, fleet: Setting, outcome: Outcome) -> Report:
    """Return the report of a policy's outcome.

    If replicas have roles, its `legs` says how many requests had a prefill and a decode leg, and what was transferred.
    """
    report = {
        "target": f"{len(fleet.profiles)} simulated engines",
        "model": args.profile,
        "asked": datasets.drawn_for(args),
        **summarise(outcome, files.slo(args), args.percentiles),
    }
    if fleet.roles is not None:
        moved = outcome.transfers
        report["legs"] = {
            "requests": len(moved),
            "share": round(len(moved) / max(1, len(outcome.done)), 4),
            "tokens_moved": sum(one.tokens for one in moved),
            "transfer_ms": spread(one.waited + one.seconds for one in moved),
            "waited_ms": spread(one.waited for one in moved),
        }
    return report


@contextmanager
def interruptible(console: Console) -> Iterator[None]:
    """End the block at once on Ctrl-C, and continue after it.

    The event loop's own handling would wait for the simulation to end, because a simulation never yields to the loop.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print("[yellow]Stopped by hand: what follows was played until then.[/]")
    finally:
        signal.signal(signal.SIGINT, before)


def played(work: Workload, fleets: Sequence[Setting], processes: int):
    """Play the workload on each fleet, and yield the outcomes in the order of `fleets`.

    Up to `processes` processes play at once.
    """
    if min(processes, len(fleets)) < 2:
        yield from (simulate(work, fleet) for fleet in fleets)
        return
    with ProcessPoolExecutor(min(processes, len(fleets)), multiprocessing.get_context("fork"), _share, (work,)) as pool:
        try:
            for outcome in pool.map(_simulate_shared, fleets):
                outcome.conversations = work.conversations
                yield outcome
        except KeyboardInterrupt:
            for worker in pool._processes.values():
                worker.terminate()  # otherwise leaving the pool would wait for the remaining simulations
            raise


_shared: list[Workload] = []


def _share(work: Workload) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    _shared[:] = [work]


def _simulate_shared(fleet: Setting) -> Outcome:
    outcome = simulate(_shared[0], fleet)
    outcome.conversations = ()  # not sent through the pipe, as the parent process has them
    return outcome


def described(args: argparse.Namespace, fleet: Setting) -> dict[str, object]:
    """Return the settings of the simulated fleet, as the report shows them.

    `fleet`: the fleet's setting under any of the policies, as they differ in nothing else.
    """
    profile, network = fleet.profiles[0], asdict(fleet.network)
    same = ("gateways", "admission", "shared_ledger", "event_loss", "pulls")
    return {
        "replicas": len(fleet.profiles),
        **{name: getattr(profile, name) for name in ("num_blocks", "block_size", "cpu_blocks")},
        **{name: getattr(fleet, name) for name in same},
        **({} if fleet.roles is None else {"pools": args.pools, "legs": fleet.legs, "network": network}),
        "profile": profile.name,
        "speeds": args.speeds or [1.0],
        "event_delay_s": fleet.event_delay,
        "outages": [asdict(one) for one in fleet.outages],
        "client_max_tokens": args.client_max_tokens,
        "clock": "virtual",
    }


def asked(argv: Sequence[str]) -> list[str]:
    """Return the command line without the flags for output files, whose names must not change the bytes of a report."""
    kept, skip = [], False
    for word in argv:
        if not skip and word.split("=")[0] not in _WRITTEN:
            kept.append(word)
        skip = not skip and word in _WRITTEN
    return kept
