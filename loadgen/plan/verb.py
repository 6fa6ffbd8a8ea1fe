"""`hitherto plan` and `loadgen plan`: what a model's KV cache holds, and the replicas a load needs to keep an SLO.

What the cache holds is computed (`policies.kv_space`). The number of replicas is found by simulation (`fleet_size`).
The output lists all fleets that were tried and all assumptions.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.table import Table

import policies
from loadgen import options
from loadgen.options import ATTAINMENT, INTERRUPTED, BadOption, attainment, flags, refuse, whole_to
from loadgen.plan import checkpoints, pools_verb, units
from loadgen.plan.checkpoints import Checkpoint
from loadgen.plan.fleet_size import BY_TOKENS, Fleet, Point, Size, TooShort, by_tokens, search
from loadgen.plan.pools_verb import GIB
from loadgen.report import files, rates, show
from loadgen.report.show import count, percent
from loadgen.report.summary import setting
from loadgen.report.tables import Cell, Grid, drawn, plain
from loadgen.simulate import Setting, rules
from loadgen.simulate.verb import asked, interruptible
from loadgen.workload import datasets
from loadgen.workload.conversations import Workload, at_rate
from policies.kv_space import RESERVE, UTILIZATION, KvSpace
from replicas.simulated.profile import Profile, load_profile

MOST_TOKENS = 1_000_000_000
MOST_REQUESTS = 200_000  # at most so many in a load that is lengthened until it holds its rate
BLOCK = 16  # tokens; vLLM's default on GPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model and GPU")
    flags(
        model,
        ("--model", str, "NAME", None, "folder with config.json, or a name on Hugging Face's hub"),
        ("--layers", whole_to(10_000), "N", None, "without --model: layers, all alike"),
        ("--kv-heads", whole_to(10_000), "N", None, "their KV heads"),
        ("--head-dim", whole_to(100_000), "N", None, "and the size of a head"),
        ("--parameters", units.parameters, "N", None, "of the model, e.g. 70B (default: by its files' size, in 16 bits)"),
        ("--gpu-memory", units.size, "SIZE", None, "memory of one GPU, e.g. 80GiB"),
        ("--gpu-memory-utilization", attainment, "R", UTILIZATION, "share of it that the engine takes (default %(default)g, vLLM's)"),
        ("--weights", units.size, "SIZE", None, "of the whole model (default: its safetensors files)"),
        ("--kv-cache-memory-bytes", units.size, "SIZE", None, 'for the cache on each GPU, instead of these three: "Available KV cache memory" in vLLM\'s log'),
        ("--tensor-parallel-size -tp", whole_to(10_000), "N", 1, "GPUs of a replica (default 1)"),
        ("--decode-context-parallel-size -dcp", whole_to(10_000), "N", 1, "of these, GPUs that share out the context (default 1)"),
        ("--kv-cache-dtype", str, "TYPE", "auto", "auto, fp8, ... (default auto)"),
        ("--block-size", whole_to(4096), "N", None, f"tokens (default {BLOCK}, and the profile's)"),
        ("--max-model-len", whole_to(MOST_TOKENS), "N", None, "longest request (default: the model's)"),
    )  # fmt: skip
    fleet = parser.add_argument_group("fleet", "with --slo: the fewest replicas that keep it for the load below")
    flags(
        fleet,
        ("--attainment", attainment, "SHARE", ATTAINMENT, "share of the requests that must be within the limits (default %(default)g)"),
        ("--kv-tokens", sizes, "A,B", None, "tokens of KV cache in a replica to try (default: half, once and twice the model's, or the profile's)"),
        ("--max-replicas", whole_to(10_000), "N", 64, "never try more (default %(default)s)"),
        ("--profile", str, "NAME|FILE", "gpu-8b", "how fast an engine is; `loadgen calibrate` measures yours (default %(default)s)"),
        ("--policy", partial(options.policy, known=rules.NAMES, hint=rules.HINT), "NAME", policies.DEFAULT, "how requests are routed (default %(default)s)"),
    )  # fmt: skip
    pools_verb.add_arguments(parser)
    datasets.add_workload(parser, simulated=True)
    files.add_report(parser)


def sizes(text: str) -> list[int]:
    return sorted({whole_to(MOST_TOKENS)(part) for part in text.split(",")})


async def plan_verb(args: argparse.Namespace, console: Console) -> int:
    check(args)
    about: dict[str, object] = {"setting": setting(["loadgen", *asked(sys.argv[1:])], args.seed)}
    found = checkpoint = None
    if args.model or args.layers:
        numbers = (args.layers, args.kv_heads, args.head_dim, args.max_model_len, args.parameters)
        checkpoint = checkpoints.find(args.model) if args.model else checkpoints.of_numbers(*numbers)
        show.print_notes(console, checkpoint.shape.notes)
        about |= {"model": checkpoint.name, "notes": list(checkpoint.shape.notes)}
    if checkpoint and args.pools:
        memory = memory_of(args, checkpoint) if args.rate else None
        space, profile = space_of(args, checkpoint, args.kv_cache_dtype), profile_of(args, checkpoint)
        given = pools_verb.Given(args, checkpoint, space, memory, profile, files.slo(args))
        code = pools_verb.plan_pools(given, console, about)
        files.write_json(args.json, about, console)
        return code
    if checkpoint:
        memory, other = memory_of(args, checkpoint), "auto" if args.kv_cache_dtype.startswith("fp8") else "fp8"
        spaces = {dtype: space_of(args, checkpoint, dtype) for dtype in (args.kv_cache_dtype, other)}
        about["kv_space"] = found = {
            dtype: figures(space, args.max_model_len, memory) for dtype, space in spaces.items()
        }
        console.print(table(args, found))
    if args.slo:
        return plan_fleet(args, console, checkpoint, found, about)
    files.write_json(args.json, about, console)
    return 0


def check(args: argparse.Namespace) -> None:
    """Check that the flags of `plan` say what to plan, and do not exclude each other. Raises BadInput."""
    files.check(args)
    datasets.check(args)
    pools_verb.check(args)
    numbers = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    missing = [flag for flag, value in numbers.items() if value is None]
    refuse(
        (args.model and len(missing) < 3, "--layers, --kv-heads and --head-dim stand for a model without files: leave --model out, or them"),
        (0 < len(missing) < 3, f"a model in numbers also needs {' and '.join(missing)}, as in --layers 80 --kv-heads 8 --head-dim 128"),
        (args.pools and not args.model and missing, "--pools needs a model: --model FOLDER, or --layers 80 --kv-heads 8 --head-dim 128"),
        (not args.slo and (args.dataset_name or args.dataset_path),
         "a load is planned for an SLO: say what would be good enough, as in --slo ttft:1s,tpot:50ms"),
        (not args.slo and args.model is None and missing,
         "there is nothing to plan: --model FOLDER for its KV cache, --slo ttft:1s and a load for the replicas it needs"),
        (not args.slo and (args.html or args.csv), "--html and --csv show how a fleet does; give --slo and a load"),
    )  # fmt: skip


# ---- the size of the KV cache


def space_of(args: argparse.Namespace, checkpoint: Checkpoint, dtype: str) -> KvSpace:
    parallel = args.tensor_parallel_size, args.decode_context_parallel_size
    return KvSpace(checkpoint.shape, dtype, args.block_size or BLOCK, *parallel)


def memory_of(args: argparse.Namespace, checkpoint: Checkpoint) -> int | None:
    """Return the bytes for the KV cache on each GPU, or None if no flag gives them. Raises BadModel, BadOption."""
    if args.kv_cache_memory_bytes or not args.gpu_memory:
        return args.kv_cache_memory_bytes
    weights = args.weights or (2 * args.parameters if args.parameters else checkpoint.weights)
    refuse((weights is None, f"--gpu-memory: {checkpoint.name} has no safetensors files to tell the size of its weights: give --weights 16GiB, "
                             "--parameters 8B, or --kv-cache-memory-bytes instead"))  # fmt: skip
    return pools_verb.memory_beside(args, weights)


def figures(space: KvSpace, context: int | None, memory: int | None) -> dict[str, object]:
    """Return the figures of a replica's KV cache: its bytes per token, and its capacity in blocks and tokens.

    `space`: the layout of the cache in one dtype; `context`: tokens of the longest request, or None for the model's
    limit; `memory`: bytes for the cache on each GPU. Without `memory`, the tokens in each GiB take the place of the
    capacity. Raises BadOption.
    """
    context, blocks = context or space.shape.context, space.blocks(memory or GIB)
    which = f"--kv-cache-memory-bytes {memory}B" if memory else "1 GiB, as no memory is given"
    refuse((not blocks, f"{which}: not one block fits, which takes {space.block_bytes:,} bytes: give it more memory"))
    found: dict[str, object] = {"dtype": space.shape.dtype if space.dtype == "auto" else space.dtype, "bytes_per_token": space.token_bytes,
                                "block_bytes": space.block_bytes, "groups": space.groups, "context": context, "memory": memory}  # fmt: skip
    if memory is None:
        return found | {"tokens_per_gib": space.kept(blocks)}
    return found | {"blocks": blocks, "tokens": space.size(blocks, context), "tokens_kept": space.kept(blocks),
                    "longest": space.longest(blocks, context), "at_once": round(blocks / space.needed(context), 2)}  # fmt: skip


def table(args: argparse.Namespace, found: dict[str, dict[str, object]]) -> Table:
    gpus = args.tensor_parallel_size
    names = [name if name == one["dtype"] else f"{name} ({one['dtype']})" for name, one in found.items()]
    context = next(iter(found.values()))["context"]
    rows = (("bytes per token, each GPU", "bytes_per_token", count), ("tokens in each GiB", "tokens_per_gib", count),
            ("memory for it, each GPU", "memory", lambda value: f"{value / GIB:,.2f} GiB"), (f"blocks of {args.block_size or BLOCK} tokens", "blocks", count),
            ("tokens, as vLLM's log says", "tokens", count), ("tokens kept for later requests", "tokens_kept", count),
            ("longest request", "longest", count), (f"requests of {context:,} at once", "at_once", lambda value: f"{value:,.2f}"))  # fmt: skip
    shown = []
    for label, key, form in rows:
        values = [one.get(key) for one in found.values()]
        if values[0] is not None and not (key == "tokens_kept" and values[0] == found[args.kv_cache_dtype]["tokens"]):
            shown.append([label, *map(form, values)])
    return plain(f"KV cache of one replica, {gpus} GPU{'s' * (gpus > 1)}", ("", *names), shown)


# ---- the fleet


def plan_fleet(
    args: argparse.Namespace, console: Console, checkpoint: Checkpoint | None, found: dict | None, about: dict
) -> int:
    """Search for the fewest replicas that keep the SLO for the load, print and write them; return the exit code.

    `checkpoint`: the model, if one was given; `found`: the figures of its KV cache by dtype; `about`: entries of the
    JSON figures, to which the plan is added.
    """
    given = profile_of(args, checkpoint)
    profile = by_tokens(given)
    drawn = datasets.drawn_for(args)
    rate = drawn["rate"] if drawn and math.isfinite(drawn["rate"]) else None
    work = load_of(args, rate)
    show.print_notes(console, work.notes)
    fleet = Fleet(Setting(args.policy, [], args.seed, engine_replies=args.replies == "engine", salt=datasets.salt(args),
                          vocabulary=args.vocab_size, users=args.users, max_concurrency=args.max_concurrency),
                  profile, files.slo(args), args.attainment, args.percentiles, rate)  # fmt: skip

    def said(point: Point) -> None:
        within = f"{percent(point.share)} within the SLO{behind(point, fleet)}"
        console.print(f"[dim]{point.replicas} × {point.tokens:,} tokens: {within}[/]")

    with interruptible(console):
        while True:
            tried = [Size(tokens, args.max_replicas) for tokens in tokens_of(args, profile, found)]
            try:
                search(work, fleet, tried, args.processes, said)
                break
            except TooShort as short:
                work = longer(args, rate, work, short, console)
    if any(size.number is not None for size in tried):
        console.print(curve([size for size in tried if size.points]))
        return INTERRUPTED
    console.print(load_in_words(args, work), style="dim")
    assumed = assumptions(args, checkpoint, found, given, bool(rate))
    answers = [answer(args, fleet, size) for size in tried]
    console.print(curve(tried))
    console.print(show.bullets(answers))
    console.print()
    pools_verb.print_assumed(console, assumed)
    points = [asdict(point) for size in tried for _, point in sorted(size.points.items())]
    plan = {"slo_ms": fleet.slo, "attainment": args.attainment, "policy": args.policy, "profile": profile.name,
            "replicas": {str(size.tokens): size.kept for size in tried}, "answers": answers, "assumed": assumed, "points": points}  # fmt: skip
    about |= {"workload": datasets.describe(args, work), "plan": plan}
    names = [f"{size.found.replicas} × {size.tokens:,} tokens" for size in tried]
    reports = {name: size.found.report for name, size in zip(names, tried)}
    records = {name: size.records for name, size in zip(names, tried)}
    rows = [((count(one["tokens"]), str(one["replicas"])), one["report"], one["kept"]) for one in points]
    shown = show.tried(("KV tokens each", "replicas"), rows)
    files.write(args, about, reports, records, console, {**about, "tried": shown})
    return 0 if any(size.kept for size in tried) else 1


def load_of(args: argparse.Namespace, rate: float | None) -> Workload:
    """Return the load that the flags describe. Raises BadOption.

    `rate`: requests per second for which its start times are drawn, or None. Start times drawn at random offer this
    rate only roughly, so they are scaled to offer it exactly.
    """
    work = datasets.workload(args)
    return at_rate(work, rate) if rate and work.starts[-1] > work.starts[0] else work


def longer(args: argparse.Namespace, rate: float | None, work: Workload, short: TooShort, console: Console) -> Workload:
    """Return the load with more requests, so that it holds its rate for longer. Raises BadOption if that cannot be.

    `rate`: requests per second; `work`: the load that was too short; `short`: the error that says so, with an estimate
    of the requests that are needed. The command finds the number itself, because the time that a fleet takes to reach
    the rate is known only after a simulation.
    """
    needed = max(short.requests, 3 * work.requests // 2)
    why = (f"{work.requests:,} requests are over before their rate has been held for long enough to size a fleet by it: "
           f"{short.answered:,.2f}/s were answered")  # fmt: skip
    more = "all of the file (no --num-prompts)" if args.num_prompts else "a longer file"
    refuse(
        (datasets.is_a_file(args), f"--dataset-path: {why}. Give {more} or a lower --request-rate"),
        (needed > MOST_REQUESTS, f"--request-rate: {why}, and {needed:,} of them are too many. Give a lower rate or shorter conversations"),
    )  # fmt: skip
    console.print(f"{why}. Played again with {needed:,}", style="dim", soft_wrap=True)
    return load_of(argparse.Namespace(**{**vars(args), "num_prompts": needed}), rate)


def load_in_words(args: argparse.Namespace, work: Workload) -> str:
    """Describe the load for which the fleet is planned."""
    if args.users:
        when = f"from {args.users:,} users"
    elif drawn := datasets.drawn_for(args):
        when = f"at {drawn['rate']:,.4g} requests/s ({drawn['arrivals']})"
    else:
        when = "at rising rates" if args.ramp_up_strategy else "at the times of its trace"
    return f"Load: {work.requests:,} requests of {datasets.dataset(args)}, {when}"


def profile_of(args: argparse.Namespace, checkpoint: Checkpoint | None) -> Profile:
    """Return the timing profile that the flags name, with their context length and block size. Raises BadOption."""
    context = args.max_model_len or (checkpoint.shape.context if checkpoint else None)
    try:
        return load_profile(args.profile, max_model_len=context, block_size=args.block_size)
    except ValueError as error:
        raise BadOption(f"--profile: {error}") from None


def tokens_of(args: argparse.Namespace, profile: Profile, found: dict | None) -> list[int]:
    """Return the sizes of a replica's KV cache to try, in tokens. Raises BadOption.

    Without --kv-tokens they are half, all and twice the capacity of the model's cache or, without a model, of the
    profile's. `found`: the figures of the model's KV cache by dtype, or None.
    """
    own, model = profile.num_blocks * profile.block_size, found and found[args.kv_cache_dtype]
    if model and args.kv_tokens is None:
        refuse((model["memory"] is None, "to plan replicas of this model its KV cache must be known: give --gpu-memory 80GiB, "
                                         "--kv-cache-memory-bytes or --kv-tokens"))  # fmt: skip
        own = model["tokens_kept"]
    tried, least = args.kv_tokens or [own // 2, own, 2 * own], 2 * profile.block_size
    refuse((tried[0] < least, f"a KV cache of {tried[0]:,} tokens is none: at least {least} are needed"))
    return tried


def answer(args: argparse.Namespace, fleet: Fleet, size: Size) -> str:
    """Return the answer for one cache size in a sentence: the fewest replicas that keep the SLO, or that none do."""
    limits = show.limits(fleet.slo)
    if size.kept is None:
        best = size.found
        return (f"With {size.tokens:,} tokens each, not even {size.missed} replicas keep {limits} for {args.attainment:.4g} of the requests: "
                f"{percent(best.share)} there{behind(best, fleet)}" + refused(best))  # fmt: skip
    gpus = size.kept * args.tensor_parallel_size
    enough, less = size.found, size.points.get(size.missed)
    short = rates.never_reached(enough.report)
    return "".join((
        f"{size.kept} replica{'s' * (size.kept > 1)} of {size.tokens:,} tokens", f" ({gpus} GPUs)" * (gpus > size.kept),
        f": {percent(enough.share)} within {limits}, hit rate {percent(enough.report['cache']['hit_rate'])}",
        f"; {size.missed} would give {percent(less.share)}{behind(less, fleet)}" if less else "", refused(enough),
        f"; but {short}, so a longer one may need more" if short else "",
    ))  # fmt: skip


def behind(point: Point, fleet: Fleet) -> str:
    """Return a phrase if requests pile up in a fleet that otherwise keeps the SLO, else "".

    Such a fleet is too small although enough requests are within the SLO, because it answers fewer than are sent.
    """
    if point.kept or point.share < fleet.attainment:
        return ""
    offered, answered = point.report["offered"]["rate"], point.report["request_throughput"]
    return f", but requests pile up ({answered:,.2f} of {show.number(offered)} requests/s answered)"


def refused(point: Point) -> str:
    """Return a note on requests of `point` that are too long for a replica's context, or "" if there are none."""
    too_long = point.report["errors"].get("http_400", 0)
    return f"; {too_long} requests are longer than a replica takes" if too_long else ""


def curve(tried: list[Size]) -> Table:
    """Return a table of what was tried: a row per number of replicas, a column per cache size.

    A cell has the share of requests within the SLO, the cache hit rate, and the requests answered per second.
    """
    rate = next((point.report["offered"]["rate"] for size in tried for point in size.points.values()), None)
    offered = "" if rate is None else f" of {rate:.2f} offered"  # the same for every fleet; none in a closed loop
    title = f"Requests within the SLO, hit rate, and requests/s answered{offered}"
    rows = []
    for replicas in sorted({replicas for size in tried for replicas in size.points}):
        row = [Cell(str(replicas))]
        for size in tried:
            text = ""
            if point := size.points.get(replicas):
                hits, answered = percent(point.report["cache"]["hit_rate"]), point.report["request_throughput"]
                text = f"{percent(point.share)}  {hits:>7}  {answered:.2f} /s"
            row.append(Cell(text, "best" if replicas == size.kept else ""))
        rows.append(row)
    return drawn(Grid(("replicas", *(f"{size.tokens:,} tokens" for size in tried)), rows), (), title=title)


def assumptions(
    args: argparse.Namespace, checkpoint: Checkpoint | None, found: dict | None, profile: Profile, at_a_rate: bool
) -> list[str]:
    """Return the assumptions on which the number of replicas rests, in sentences.

    `found`: the figures of the model's KV cache by dtype, or None; `at_a_rate`: the load was drawn for a request rate.
    """
    said = [f"engines as fast as the profile {profile.name} says" + (", whatever this model's size: `loadgen calibrate` measures yours" if checkpoint else ""),
            f"one gateway, {args.policy}, with KV events; replicas neither fail nor come late; their caches are empty at the start",
            ("what counts is sent while the rate is held: from when conversations end as often as they begin until the last one begins"
             if at_a_rate else "every request counts, the first ones too") + "; what fails or is too long counts as not within the SLO"]  # fmt: skip
    if profile.times_by_share:
        said.append(BY_TOKENS)
    one = found[args.kv_cache_dtype] if found and not args.kv_tokens else None
    if one and not args.kv_cache_memory_bytes:
        said.append(f"{args.gpu_memory_utilization * 100:.0f} % of each GPU's {args.gpu_memory / GIB:.4g} GiB for the engine, of which {RESERVE / GIB:.2g} GiB "
                    "are for neither weights nor cache (a guess; vLLM's log has the memory that is left)")  # fmt: skip
    if one and one["groups"] > 1:
        said.append(
            "every layer keeps every token, as it does for cached prefixes; running requests need less where layers have windows"
        )
    return said
