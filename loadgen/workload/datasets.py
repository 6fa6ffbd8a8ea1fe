"""The loads by name, the flags that each takes, and their start times.

A load is a function, called as load(rng, requests, **flags), that returns a Workload. Its attribute `takes` has its
flags with their defaults; other flags are refused. Loads and flags that `vllm bench serve` has too bear the same names.
"""

from __future__ import annotations

import argparse
import math
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from loadgen.options import flags, positive, rate, refuse, seconds, share, whole
from loadgen.workload import generators, texts, traces
from loadgen.workload.arrivals import Ramp, conversation_starts
from loadgen.workload.conversations import BadWorkload, Conversation, Workload
from loadgen.workload.documents import documents
from loadgen.workload.files import Reader
from loadgen.workload.generators import shaped
from loadgen.workload.synthetic import VOCABULARY

REQUESTS, RATE = 200, 4.0  # number, and rate per second, of the requests where neither flags nor a trace give them
_NEEDED = object()  # the default of a flag that must be given


@shaped(dataset_path=None, num_prefixes=12, prefix_len=2000, turns=5, think_time=1.0, output_len=64)
def _multi_turn(rng: random.Random, requests: int | None, shape: SimpleNamespace) -> Workload:
    about = documents(shape.dataset_path, shape.num_prefixes, shape.prefix_len * texts.CHARS_PER_TOKEN)
    made = texts.multi_turn(about, requests or REQUESTS, shape.turns, shape.think_time, shape.output_len, rng)
    return Workload(made, [])


@shaped(dataset_path=_NEEDED, think_time=1.0, output_len=None, bad_lines="stop", disable_shuffle=False)
def _conversations(rng: random.Random, requests: int | None, shape: SimpleNamespace) -> Workload:
    path, reader, shuffle = shape.dataset_path, _reader(shape), not shape.disable_shuffle
    asked = traces.conversation_file(
        path, requests, shape.output_len, shape.think_time, rng, reader=reader, shuffle=shuffle
    )
    return Workload(asked, [], reader.notes())


def _reader(shape: SimpleNamespace) -> Reader:
    return Reader(shape.dataset_path, shape.bad_lines == "skip")


def _trace(
    read: Callable[[Reader, SimpleNamespace], Iterator[traces.Timed]], **units: float
) -> Callable[..., Workload]:
    """Return the load that replays traces of one format.

    `read`: yields the trace's requests with their times; `units`: the flags that only this format has, with their
    defaults.
    """

    @shaped(dataset_path=_NEEDED, **units, output_len=None, bad_lines="stop", trace_start=0.0, trace_seconds=math.inf, trace_speed=1.0,
            trace_jitter=0.0)  # fmt: skip
    def load(rng: random.Random, requests: int | None, shape: SimpleNamespace) -> Workload:
        reader = _reader(shape)
        part = {name: getattr(shape, f"trace_{name}") for name in ("start", "seconds", "speed", "jitter")}
        return traces.replay(read(reader, shape), reader, requests, rng, **part)

    return load


def _hash_trace(block: int, unit: float) -> Callable[..., Workload]:
    def read(reader: Reader, shape: SimpleNamespace) -> Iterator[traces.Timed]:
        block, unit = shape.timed_trace_chunk_hash_size, shape.timed_trace_sec_multiplier
        return traces.hash_trace(reader, block, unit, shape.output_len)

    return _trace(read, timed_trace_chunk_hash_size=block, timed_trace_sec_multiplier=unit)


def _made(generator: Callable[..., list[Conversation]]) -> Callable[..., Workload]:
    @shaped(**generator.takes)
    def load(rng: random.Random, requests: int | None, shape: SimpleNamespace) -> Workload:
        return Workload(generator(rng, requests or REQUESTS, **vars(shape)), [])

    return load


_FILES = dict.fromkeys(("conversations", "sharegpt", "custom"), _conversations)  # each entry shows its form
_TEXTS: dict[str, Callable[..., Workload]] = {"multi-turn": _multi_turn, **_FILES}
_TRACES: dict[str, Callable[..., Workload]] = {
    "mooncake": _hash_trace(512, 1e-3),
    "bailian": _hash_trace(16, 1.0),
    "timed_trace": _hash_trace(16, 1.0),
    "azure": _trace(lambda reader, shape: traces.azure_trace(reader, shape.output_len)),
}
_GENERATORS: dict[str, Callable[..., Workload]] = {
    name: _made(getattr(generators, "random_tokens" if name == "random" else name))
    for name in ("prefix_repetition", "chat", "rag", "agents", "rollouts", "random")
}
DATASETS = _TEXTS | _TRACES | _GENERATORS
_TAKES: dict[str, dict[str, object]] = {name: load.takes for name, load in DATASETS.items()}
_SHAPE = list(dict.fromkeys(key for takes in _TAKES.values() for key in takes))


def add_seeds(parser: argparse.ArgumentParser) -> None:
    flags(
        parser,
        ("--seeds", whole, "N", 1, "run the load with N seeds, from --seed on, and show means with the range over the seeds (default %(default)s)"),
    )  # fmt: skip


def of_seeds(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return a copy of the flags for each seed of the load, in which the flag `seed` has its value.

    There are `args.seeds` seeds, which count up from `args.seed`.
    """
    return [argparse.Namespace(**{**vars(args), "seed": args.seed + number}) for number in range(args.seeds)]


def add_workload(parser: argparse.ArgumentParser, simulated: bool = False) -> None:
    """Add the flags that describe a load.

    `simulated`: the load is played in virtual time, without HTTP; the flag --processes is added.
    """
    if simulated:
        parser.set_defaults(backend="openai-chat")
        flags(parser, ("--processes", whole, "N", 1, "simulate several fleets at once, in N processes (default 1)"))
    group = parser.add_argument_group("workload")
    flags(
        group,
        ("--dataset-name", tuple(DATASETS), "NAME", None, f"one of {', '.join(DATASETS)} (default: what the file is, else multi-turn)"),
        ("--dataset-path --trace", Path, "FILE", None, "a trace, a file of conversations (.gz too), or a text to talk about "
         "(default: the standard library's documentation)"),
        ("--num-prompts --requests", whole, "N", None, f"requests in all; every turn is one (default {REQUESTS}, or the whole file)"),
        ("--seed", int, None, 0, "same seed, same load (default %(default)s)"),
        ("--replies", ("file", "engine"), None, None, "whose replies stay in the conversation (default: the file's where it has them)"),
        ("--bad-lines", ("stop", "skip"), None, None, "what to do about lines of a file that are wrong (default stop)"),
        ("--vocab-size", whole, "N", VOCABULARY, "token ids made up are below this; lower it for smaller vocabularies (default %(default)s)"),
        ("--disable-shuffle", None, None, None, "take a file's conversations in their order"),
    )  # fmt: skip
    _add_arrivals(parser.add_argument_group("when"))
    _add_shape(parser.add_argument_group("shape of the load, in tokens; each load has its own defaults"))


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    flags(
        group,
        ("--request-rate", rate, "R", None, f"requests per second; inf sends all at once (default: the trace's own times, else {RATE:g})"),
        ("--burstiness", rate, "B", 1.0, "shape of the gamma-distributed gaps: 1 Poisson, less in bursts, inf constant (default %(default)g)"),
        ("--ramp-up-strategy", ("linear", "exponential"), None, None, "let the rate rise or fall over the run"),
        ("--ramp-up-start-rps", positive, "R", None, "rate of a ramp at its start"),
        ("--ramp-up-end-rps", positive, "R", None, "and at its end"),
        ("--users", whole, "N", None, "closed loop: N users, each with one conversation at a time"),
        ("--max-concurrency", whole, "N", None, "never more requests in flight; the wait shows up as lateness"),
        ("--trace-start", seconds, "S", None, "traces: leave out what comes before this second"),
        ("--trace-seconds", positive, "S", None, "traces: and play so many seconds of it"),
        ("--trace-speed", positive, "X", None, "traces: play it X times as fast (default 1)"),
        ("--trace-jitter", seconds, "S", None, "traces: move each request by up to S seconds (default 0)"),
    )  # fmt: skip


def _add_shape(group: argparse._ArgumentGroup) -> None:
    flags(
        group,
        ("--turns", whole, "N", None, "mean turns of a conversation, or steps of an agent"),
        ("--think-time", seconds, "S", None, "mean seconds between a reply and the next turn"),
        ("--num-prefixes --prefix-repetition-num-prefixes", whole, "N", None, "different documents or system prompts"),
        ("--prefix-len --prefix-repetition-prefix-len", whole, "N", None, "length of each"),
        ("--suffix-len --prefix-repetition-suffix-len --random-input-len", whole, "N", None, "length of each question, task or tool result"),
        ("--output-len --prefix-repetition-output-len --random-output-len --sharegpt-output-len --custom-output-len", whole, "N", None,
         "length of a reply (default: as in the file)"),
        ("--output-sigma", seconds, "S", None, "rollouts: how long the tail of the replies' lengths is, as the standard deviation of their logarithm"),
        ("--range-ratio --random-range-ratio", share, "R", None, "lengths vary from 1-R to 1+R times these"),
        ("--zipf", seconds, "S", None, "the k-th most popular document or system prompt is asked 1/k^S as often"),
        ("--documents-per-prompt", whole, "N", None, "rag: passages before each question"),
        ("--forks", whole, "N", None, "agents: sub-agents started at once"),
        ("--best-of", whole, "N", None, "rollouts: trajectories of each task"),
        ("--timed-trace-chunk-hash-size", whole, "N", None, "tokens of one hash id in a trace of another kind"),
        ("--timed-trace-sec-multiplier", positive, "X", None, "and seconds of one unit of its timestamps"),
    )  # fmt: skip


def dataset(args: argparse.Namespace) -> str:
    """Return the load's name, guessed from the file's content if no flag gives it. Raises BadWorkload."""
    if args.dataset_name is None:
        with _naming_the_flag(args):
            return (args.dataset_path and traces.guess(args.dataset_path)) or "multi-turn"
    return args.dataset_name


@contextmanager
def _naming_the_flag(args: argparse.Namespace) -> Iterator[None]:
    """Prefix the message of a BadWorkload in the block with the flag that named the file."""
    try:
        yield
    except BadWorkload as error:
        raise BadWorkload(f"--dataset-path {error}" if args.dataset_path else str(error)) from None


def shape(args: argparse.Namespace) -> dict[str, object]:
    """Return, by name, the flags that the user gave and that shape the load. Raises BadOption.

    It raises if the load does not take one of them, or if the load needs a file and none is given.
    """
    name = dataset(args)
    takes = _TAKES[name]
    given = {key: value for key in _SHAPE if (value := getattr(args, key)) is not None}
    if "think_time" not in takes:  # single requests have no pauses
        given.pop("think_time", None)
    refuse(
        *((key not in takes, f"--{key.replace('_', '-')} means nothing to {name}") for key in given),
        (
            takes.get("dataset_path") is _NEEDED and not args.dataset_path,
            f"--dataset-name {name} needs --dataset-path FILE",
        ),
    )
    return given


def check(args: argparse.Namespace) -> None:
    """Check, before anything is sent, that no given flags exclude each other. Raises BadOption, BadWorkload."""
    name = dataset(args)
    shape(args), _ramp(args)
    refuse(
        (args.replies == "file" and name == "multi-turn", "--replies file needs a file of conversations (--dataset-path FILE.jsonl)"),
        (args.replies == "engine" and completions(args) and name not in _TEXTS,
         f"--replies engine: {name} sends token ids, and replies are text; add --backend openai-chat"),
        (args.users and (args.request_rate or args.ramp_up_strategy or args.max_concurrency),
         "--users is a closed loop: it goes without --request-rate, --ramp-up-strategy and --max-concurrency"),
    )  # fmt: skip


def completions(args: argparse.Namespace) -> bool:
    """Return whether requests go to /v1/completions.

    The flag --backend decides; without it, loads of made-up tokens do, and loads of text do not.
    """
    return dataset(args) not in _TEXTS if args.backend is None else args.backend != "openai-chat"


def has_times(args: argparse.Namespace) -> bool:
    """Return whether the load is a trace, which has times of its own."""
    return dataset(args) in _TRACES


def is_a_file(args: argparse.Namespace) -> bool:
    """Return whether the requests come from a file, which bounds how many different requests there are."""
    return dataset(args) in _TRACES | _FILES


def salt(args: argparse.Namespace) -> int:
    """Return a salt (seed) for made-up tokens, which differs by seed, load and file name.

    With another salt, prompts have other tokens, which no earlier run has left in an engine's cache.
    """
    return args.seed << 32 | zlib.crc32(
        f"{dataset(args)} {args.dataset_path.name if args.dataset_path else ''}".encode()
    )


def workload(args: argparse.Namespace) -> Workload:
    """Return the whole load that the flags describe: conversations and start times. Raises BadOption, BadWorkload."""
    rng = random.Random(args.seed)
    name, given = dataset(args), shape(args)
    with _naming_the_flag(args):
        load = DATASETS[name](rng, args.num_prompts, **given)
    if not load.starts or args.users or args.request_rate or args.ramp_up_strategy:
        turns = [conversation.requests for conversation in load.conversations]
        rate = math.inf if args.users else args.request_rate or RATE  # in a closed loop all users begin at once
        load.starts = conversation_starts(turns, rate, rng, args.burstiness, _ramp(args))
    return load


def drawn_for(args: argparse.Namespace) -> dict[str, object] | None:
    """Return the request rate for which the start times are drawn, and in words how gaps between them vary.

    Returns None if they are not drawn for one rate: with the times of a trace, with --users, or with a ramp.
    """
    drawn = args.request_rate or not has_times(args)
    if not drawn or args.users or args.ramp_up_strategy:
        return None
    gaps = {1.0: "Poisson", math.inf: "constant gaps"}.get(args.burstiness, f"burstiness {args.burstiness:g}")
    return {"rate": args.request_rate or RATE, "arrivals": gaps}


def _ramp(args: argparse.Namespace) -> Ramp | None:
    ends, how = (args.ramp_up_start_rps, args.ramp_up_end_rps), args.ramp_up_strategy
    refuse(
        (any(ends) and not how, "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy"),
        (how and (not all(ends) or args.request_rate),
         "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate"),
    )  # fmt: skip
    return Ramp(*ends, how == "exponential") if how else None


def describe(args: argparse.Namespace, load: Workload) -> dict[str, object]:
    """Return all settings of the load for the report, defaults included, with the load's size."""
    name = dataset(args)
    names = ("num_prompts", "request_rate", "burstiness", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "users",
             "max_concurrency", "seed", "replies")  # fmt: skip
    return {
        "dataset_name": name,
        **{key: getattr(args, key) for key in names},
        **_TAKES[name],
        **shape(args),
        "dataset_path": str(args.dataset_path) if args.dataset_path else None,
        "notes": load.notes,
        "conversations": len(load.conversations),
        "requests": load.requests,
        "last_start_s": round(load.starts[-1], 3) if load.starts else 0.0,
    }
