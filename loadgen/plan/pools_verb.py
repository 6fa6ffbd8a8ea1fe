"""`hitherto plan --pools`: the cost of moving KV caches, and the prefill and decode pools that a load needs.

The command also shows how large weights and KV cache are in number formats of fewer bits. It prints a short answer,
tables and the assumptions; `--json` has all figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

from loadgen.options import flags, positive, refuse, whole_to
from loadgen.plan import units
from loadgen.plan.checkpoints import Checkpoint
from loadgen.plan.fleet_size import BY_TOKENS, by_tokens
from loadgen.plan.pools import Engines, Load, Pool, Sizing, decode_pool, prefill_pool, smallest
from loadgen.plan.transfers import BUFFER_STEP, COLLATED, PER_TRANSFER, Transfer, step_seconds, transfer
from loadgen.report import show
from loadgen.report.show import milliseconds, percent
from loadgen.report.tables import plain
from policies.kv_space import KV_DTYPES, BadModel, KvSpace, NumberFormat, memory_for_kv
from policies.transfers import LATENCY
from replicas.simulated.profile import Profile

LENGTHS = (512, 2_048, 8_192, 32_768, 131_072)  # tokens; the prompts of the table
# By format: the KV cache dtype as in vLLM's --kv-cache-dtype, and the number format of weights with their usual scales.
FORMATS = {"fp16": ("float16", NumberFormat(16)), "fp8": ("fp8", NumberFormat(8)), "int8": ("int8_per_token_head", NumberFormat(8)),
           "int4": ("int4_per_token_head", NumberFormat(4, 2, 128)), "fp4": ("nvfp4", NumberFormat(4, 1, 16))}  # fmt: skip
GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pools", "prefill and decode on replicas of their own")
    group.add_argument("--pools", action="store_true", help="plan them: transfer, buffer, replicas of each kind")
    flags(
        group,
        ("--link", units.link, "RATE", None, "between two replicas, all GPUs together, e.g. 100Gbit/s or 25GB/s"),
        ("--chunk-size", whole_to(1_000_000), "N", None, "tokens moved at a time, as LMCache's chunk_size (default: the block size)"),
        ("--prompt-tokens", whole_to(1_000_000_000), "N", None, "of a request of the load"),
        ("--output-tokens", whole_to(1_000_000_000), "N", None, "of its answer"),
        ("--rate", positive, "R", None, "requests a second"),
    )  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Check the flags that only --pools takes, and those that exclude it. Raises BadOption."""
    given = [flag for flag in ("link", "chunk_size", "prompt_tokens", "output_tokens", "rate") if getattr(args, flag)]
    refuse((given and not args.pools, f"--{given[0].replace('_', '-') if given else ''} is of --pools: add it"))
    load = {"--rate": args.rate, "--prompt-tokens": args.prompt_tokens, "--output-tokens": args.output_tokens, "--slo": args.slo}  # fmt: skip
    missing = [flag for flag, value in load.items() if not value]
    if args.pools:
        refuse(
            (args.dataset_name or args.dataset_path or args.request_rate or args.users,
             "--pools takes its load as numbers: --rate 10 --prompt-tokens 4000 --output-tokens 300, without a data set"),
            (args.html or args.csv, "--pools has no --html or --csv: --json FILE has all figures"),
            (missing and (args.rate or args.output_tokens or args.slo), f"the pools of a load also need {', '.join(missing)}, as in "
             "--rate 10 --prompt-tokens 4000 --output-tokens 300 --slo ttft:2s,tpot:50ms"),
        )  # fmt: skip


def memory_beside(args: argparse.Namespace, weights: int) -> int:
    """Return the bytes for the KV cache that each GPU has left beside its part of the weights. Raises BadModel.

    `weights`: bytes of the weights on all GPUs together.
    """
    return memory_for_kv(args.gpu_memory, weights, args.tensor_parallel_size, args.gpu_memory_utilization)


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of one plan of pools: the model, its KV cache, a timing profile, and the limits of the SLO."""

    args: argparse.Namespace
    checkpoint: Checkpoint
    space: KvSpace
    memory: int | None  # bytes for the KV cache on each GPU, if given; only where pools are sized
    own_profile: Profile  # the timing profile that the flags name
    slo: dict[str, float] | None  # limits in ms

    @property
    def profile(self) -> Profile:
        """The timing profile of the engines.

        If `memory` sets the size of the KV cache, decode times depend on the tokens in use, and not on the share of the
        cache in use.
        """
        return by_tokens(self.own_profile) if self.memory else self.own_profile

    @property
    def cache_tokens(self) -> int:
        """The capacity of the KV cache of one replica, in tokens."""
        if self.memory:
            return self.space.size(self.space.blocks(self.memory), self.context)
        return self.own_profile.num_blocks * self.own_profile.block_size

    @property
    def piece(self) -> int:
        """The number of tokens per transfer."""
        return self.args.chunk_size or self.space.block_size

    @property
    def context(self) -> int:
        return self.args.max_model_len or self.checkpoint.shape.context

    def transfer(self, tokens: int) -> Transfer:
        return transfer(self.space, tokens, self.piece, self.args.link, self.profile)


def plan_pools(given: Given, console: Console, about: dict[str, object]) -> int:
    """Print the plan of pools, add it to `about` (the JSON figures) and return the exit code. Raises BadOption."""
    args = given.args
    _check_lengths(given)
    prompt = args.prompt_tokens or given.context
    main = given.transfer(prompt)
    moved = [given.transfer(tokens) for tokens in sorted({*LENGTHS, prompt, given.context}) if tokens <= given.context]
    sizings = size_pools(given, main) if args.rate else None
    step = sizings[1].pool.step if sizings else step_seconds(given.profile, 1, prompt)
    answers = [*(pool_answers(given, main, *sizings) if sizings else ()), *transfer_answers(given, main, step)]
    console.print(show.bullets(answers))
    console.print()
    console.print(transfer_table(given, moved, step))
    if sizings:
        prefill, decode = (sizing.pool for sizing in sizings)
        rows = (("replicas", str(prefill.replicas), str(decode.replicas)),
                ("busy (time, streams)", percent(prefill.busy), percent(decode.busy)),
                ("TTFT", _ms(prefill.ttft), ""), ("TPOT", "", _ms(decode.step)))  # fmt: skip
        console.print(plain("Pools", ("", "prefill", "decode"), rows))
    weights, fits = sizes(given)
    console.print(size_table(given, weights, fits))
    assumed = assumptions(given, bool(sizings))
    print_assumed(console, assumed)
    about["pools"] = {"answers": answers, "assumed": assumed, "profile": given.profile.name, "link_bytes_per_s": args.link,
                      "tokens_per_transfer": given.piece, "decode_step_s": step, "buffer_step": BUFFER_STEP,
                      "transfers": [asdict(one) | {"pays": one.pays} for one in moved],
                      "weights": weights, "kv": fits, "slo_ms": given.slo} | dict(zip(("prefill", "decode"), map(asdict, sizings or ())))  # fmt: skip
    return 1 if sizings and any(sizing.pool.limits for sizing in sizings) else 0


def print_assumed(console: Console, assumed: list[str]) -> None:
    console.print("Assumed:", style="dim")
    console.print(show.bullets(assumed), style="dim")


def _check_lengths(given: Given) -> None:
    args, size = given.args, given.space.block_size
    unknown = ", ".join(set(given.slo or ()) - {"ttft", "tpot"})
    total = (args.prompt_tokens or 0) + (args.output_tokens or 0)
    refuse(
        (unknown, f"--slo {unknown}: the arithmetic of pools has ttft and tpot alone"),
        (given.slo and not 0 < args.attainment < 1,
         f"--attainment {args.attainment:g}: pools are sized for a share between 0 and 1, such as 0.99"),
        (total > given.context, f"--prompt-tokens and --output-tokens are {total:,} tokens, and the longest request has {given.context:,}: "
                                "less of them, or another --max-model-len"),
        (given.space.context_parallel > 1, "--pools knows no context that is split over GPUs: leave --decode-context-parallel-size out"),
        (given.piece % size, f"--chunk-size {given.piece} is no multiple of the block size, {size}: whole blocks are moved"),
    )  # fmt: skip


# ---- the pools of a load


def size_pools(given: Given, main: Transfer) -> tuple[Sizing, Sizing]:
    """Return the smallest prefill pool and the smallest decode pool that serve the load within the limits.

    `main`: the cost of moving the KV cache of one prompt of the load.
    """
    args, slo = given.args, given.slo or {}
    ttft, tpot = (slo[name] / 1000 if name in slo else None for name in ("ttft", "tpot"))
    load = Load(args.rate, args.prompt_tokens, args.output_tokens, ttft, tpot, args.attainment)
    tokens = args.prompt_tokens + args.output_tokens
    streams = given.cache_tokens / tokens
    if given.memory:
        streams = (given.space.blocks(given.memory) - 1) / given.space.needed(tokens)
    engines = Engines(given.profile, main, args.link, streams)
    decode = smallest(lambda number: decode_pool(load, engines, number), args.max_replicas)
    step = decode.pool.step
    return smallest(lambda number: prefill_pool(load, engines, number, step), args.max_replicas), decode


def pool_answers(given: Given, main: Transfer, prefill: Sizing, decode: Sizing) -> list[str]:
    """Return sentences on the pools that serve the load, and on why smaller pools do not.

    If no prefill pool or no decode pool serves the load, the sentences say why. `main`: the cost of moving the KV cache
    of one prompt of the load.
    """
    args, pools = given.args, {"prefill": prefill, "decode": decode}
    load = f"{args.rate:g} requests a second of {args.prompt_tokens:,} + {args.output_tokens:,} tokens"
    limits = f"{show.limits(given.slo or {})} for {percent(args.attainment)} of them"
    if failed := {name: sizing.pool for name, sizing in pools.items() if sizing.pool.limits}:
        most = f"pool of up to {args.max_replicas} replicas holds {load} within {limits}"
        return [f"No {name} {most}: {_why(pool, given, main)}" for name, pool in failed.items()]
    replicas = f"{prefill.pool.replicas} prefill : {decode.pool.replicas} decode replicas"
    gpus = (prefill.pool.replicas + decode.pool.replicas) * args.tensor_parallel_size
    said = [f"{replicas} ({gpus} GPUs) hold {load} within {limits}"]
    for name, sizing in pools.items():
        less = sizing.one_less
        why = f"{less.replicas} would not do, {_why(less, given, main)}" if less else "1 is the fewest"
        said.append(f"{name}: {why}")
    return said


def _why(pool: Pool, given: Given, main: Transfer) -> str:
    """Return in words why a pool does not suffice: a phrase for each limit that it exceeds."""
    room = f"{pool.streams:,.1f} streams each" if pool.streams else ""
    said = {
        "TPOT": f"a decode step of {_ms(pool.step)} with {room} is above TPOT",
        "KV cache": f"its KV cache has room for {pool.room:,.1f} requests of this length, and {pool.streams:,.1f} would be there",
        "max_num_seqs": f"max_num_seqs ({given.profile.max_num_seqs}) is full",
        "prefill rate": f"prompts arrive {pool.busy:,.2f} times as fast as they are computed",
        "TTFT": f"the first token takes {_ms(pool.ttft)}, of which {_ms(pool.wait)} waiting and {_ms(main.compute_seconds)} computing",
        "link": f"the link would have to carry {percent(pool.link_busy)} of what it can",
    }
    return "; ".join(said[limit] for limit in pool.limits)


# ---- the transfer


def transfer_answers(given: Given, main: Transfer, step: float) -> list[str]:
    """Return sentences on moving a prompt's KV cache: its size, the buffer, and the seconds against recomputing it.

    `main`: the cost of the transfer; `step`: seconds of a decode step.
    """
    space = given.space
    parts = [
        f"{layers.count} layers × {space.moved_blocks(layers, main.tokens):,} blocks × {space.layer_block_bytes:,} B"
        for layers in space.shape.layers
    ]
    gpus = f" × {space.tensor_parallel} GPUs = {main.bytes:,} B" if space.tensor_parallel > 1 else ""
    each = f"({space.token_bytes / 1e6:.3g} MB a token{' and GPU' * bool(gpus)})"
    said = [f"{main.tokens:,} tokens: {' + '.join(parts)} = {main.bytes_per_gpu:,} B{gpus} {each}"]
    said.append(f"transfer buffer on each GPU: {_gib(main.buffer)} ({_gib(main.bytes_per_gpu)} rounded up to 256 MiB)")
    if (seconds := main.seconds) is not None:
        quick, slow = sorted((seconds, main.compute_seconds))
        times = f"{slow / quick:.1f} times as"
        verdict = f"moving pays, {times} quick" if main.pays else f"moving does not pay, it takes {times} long"
        terms = f"{LATENCY * 1000:.0f} ms + {main.count:,} × {PER_TRANSFER * 1e6:.0f} us"
        terms += f" + {main.bytes / 1e9:,.2f} GB / {given.args.link / 1e9:g} GB/s"
        again = f"computed again in {_ms(main.compute_seconds)} at the speed of {given.profile.name}"
        said.append(f"moved in {_ms(seconds)} ({terms}), {again}: {verdict}")
        said.append(f"that is {seconds / step:.1f} decode steps of {_ms(step)}")
    if given.piece < COLLATED:
        fewer = -(-main.tokens // COLLATED)
        said.append(f"Warning: {given.piece} tokens a transfer are {main.count:,} transfers; of {COLLATED} tokens they would be {fewer:,} and take "
                    f"{_ms((main.count - fewer) * PER_TRANSFER)} less: --block-size {COLLATED}, or LMCache's chunk_size (--chunk-size 256)")  # fmt: skip
    return said


def transfer_table(given: Given, moved: Sequence[Transfer], step: float) -> Table:
    timed = ("moved", "computed", "steps", "pays") if given.args.link else ("computed",)
    rows = []
    for one in moved:
        row = [f"{one.tokens:,}", f"{one.bytes / GIB:,.2f}", f"{one.buffer / GIB:,.2f}", f"{one.count:,}"]
        times = [_ms(one.compute_seconds)]
        if one.seconds is not None:
            times = [_ms(one.seconds), *times, f"{one.seconds / step:,.1f}", "yes" if one.pays else "no"]
        rows.append(row + times)
    heads = ("prompt", "GiB", "buffer", "pieces", *timed)
    return plain("Moving a prompt's cache (buffer on each GPU)", heads, rows, left=())


# ---- sizes in fewer bits


def sizes(given: Given) -> tuple[dict[str, int] | None, dict[str, dict[str, object]]]:
    """Return the sizes of weights and KV cache in several number formats.

    The first dictionary has the bytes of the weights by format; it is None if the number of parameters is not known.
    The second has, by format of the cache, the bytes per token and the tokens that fit next to the weights in each
    format (None: the weights do not fit).
    """
    args = given.args
    parameters = args.parameters or given.checkpoint.parameters
    weights = {name: form.bytes(parameters) for name, (_, form) in FORMATS.items()} if parameters else None

    def tokens(space: KvSpace, size: int) -> int | None:
        try:
            return space.size(space.blocks(memory_beside(args, size)), given.context)
        except BadModel:
            return None

    found: dict[str, dict[str, object]] = {}
    for name, (dtype, _) in FORMATS.items():
        if given.checkpoint.shape.latent and KV_DTYPES[dtype].scale:
            continue
        space = replace(given.space, dtype=dtype)
        found[name] = {"dtype": dtype, "bytes_per_token": space.token_bytes * space.tensor_parallel}
        if weights and args.gpu_memory:
            found[name]["tokens"] = {form: tokens(space, size) for form, size in weights.items()}
    return weights, found


def size_table(given: Given, weights: dict[str, int] | None, fits: dict[str, dict[str, object]]) -> Table:
    gpu, title = given.args.gpu_memory, "Sizes"
    if gpu and weights:
        title += f", and tokens of cache that fit in {given.args.tensor_parallel_size} × {_gib(gpu)}"
    rows = [["bytes of a token", *(f"{one['bytes_per_token']:,}" for one in fits.values())]]
    for name, size in (weights or {}).items():
        tokens = [one["tokens"][name] for one in fits.values()] if gpu else []
        cells = ["no room" if one is None else f"{one / 1000:,.0f} k" for one in tokens]
        rows.append([f"weights {name}, {size / 1e9:,.1f} GB", *(cells or [""] * len(fits))])
    return plain(title, ("", *(f"KV {name}" for name in fits)), rows)


def assumptions(given: Given, load: bool) -> list[str]:
    args = given.args
    said = [f"engines are as fast as the profile {given.profile.name} says, whatever this model's size: `loadgen calibrate` measures yours",
            "nothing of a prompt is cached at either side"]  # fmt: skip
    if args.link:
        said.append(f"{LATENCY * 1000:.0f} ms for the second leg's way and handshake, as the gateway estimates, and {PER_TRANSFER * 1e6:.0f} us for each "
                    "transfer (LMCache over NVLink: 7,500 tokens take 20 ms in pieces of 16, 8 ms in pieces of 128)")  # fmt: skip
    if load:
        own = f"a replica's KV cache is the profile's, {given.cache_tokens:,} tokens: --gpu-memory counts the model's"
        said.append(f"a replica's KV cache has room for {given.cache_tokens:,} tokens" if given.memory else own)
        said += [BY_TOKENS] if given.memory and given.own_profile.times_by_share else []
        said += ["left out: unlike prompts and answers, bursts beyond a Poisson load, prompts batched together, transfers that meet on a link, "
                 "room for prompts until they are fetched, failures, other work of the decoder while it fetches",
                 "TTFT is wait + prefill + transfer + the decoder's step that it meets (half of it) and its own, which computes the prompt's last "
                 "token" + "; without --link the transfer counts as 0" * (not args.link)]  # fmt: skip
    if not (args.parameters or given.checkpoint.parameters):
        said.append("the size of the weights is not known: --parameters 70B")
    elif args.gpu_memory:
        said.append("weights have all parameters in that format; checkpoints often keep embeddings in 16 bits")
    return said


def _ms(seconds: float | None) -> str:
    return milliseconds(None if seconds is None else seconds * 1000)


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"
