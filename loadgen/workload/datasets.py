"""The loads by name, the flags that each takes, and their start times.

A load is a function (rng, requests, **flags) -> Workload. Its keyword arguments are its flags, with their names and
defaults; other flags are refused. Names and flags are those of `vllm bench serve` where it has them.
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

from loadgen.options import BadOption, flags, positive, rate, seconds, share, whole
from loadgen.workload import generators, texts, traces
from loadgen.workload.arrivals import Ramp, conversation_starts
from loadgen.workload.conversations import BadWorkload, Conversation, Workload
from loadgen.workload.documents import documents
from loadgen.workload.files import Reader
from loadgen.workload.synthetic import VOCABULARY

REQUESTS, RATE = 200, 4.0  # defaults without flags or a trace


def _multi_turn(
    rng: random.Random,
    requests: int | None,
    *,
    dataset_path: Path | None = None,
    num_prefixes: int = 12,
    prefix_len: int = 2000,
    turns: int = 5,
    think_time: float = 1.0,
    output_len: int = 64,
) -> Workload:
    about = documents(dataset_path, num_prefixes, prefix_len * texts.CHARS_PER_TOKEN)
    return Workload(texts.multi_turn(about, requests or REQUESTS, turns, think_time, output_len, rng), [])


def _conversations(
    rng: random.Random,
    requests: int | None,
    *,
    dataset_path: Path,
    think_time: float = 1.0,
    output_len: int | None = None,
    bad_lines: str = "stop",
    disable_shuffle: bool = False,
) -> Workload:
    reader = Reader(dataset_path, bad_lines == "skip")
    asked = traces.conversation_file(
        dataset_path, requests, output_len, think_time, rng, reader=reader, shuffle=not disable_shuffle
    )
    return Workload(asked, [], reader.notes())


def _hash_trace(
    rng: random.Random,
    requests: int | None,
    *,
    dataset_path: Path,
    timed_trace_chunk_hash_size: int = 16,
    timed_trace_sec_multiplier: float = 1.0,
    output_len: int | None = None,
    bad_lines: str = "stop",
    trace_start: float = 0.0,
    trace_seconds: float = math.inf,
    trace_speed: float = 1.0,
    trace_jitter: float = 0.0,
) -> Workload:
    reader = Reader(dataset_path, bad_lines == "skip")
    timed = traces.hash_trace(reader, timed_trace_chunk_hash_size, timed_trace_sec_multiplier, output_len)
    return traces.replay(
        timed, reader, requests, rng, start=trace_start, seconds=trace_seconds, speed=trace_speed, jitter=trace_jitter
    )


def _azure(
    rng: random.Random,
    requests: int | None,
    *,
    dataset_path: Path,
    output_len: int | None = None,
    bad_lines: str = "stop",
    trace_start: float = 0.0,
    trace_seconds: float = math.inf,
    trace_speed: float = 1.0,
    trace_jitter: float = 0.0,
) -> Workload:
    reader = Reader(dataset_path, bad_lines == "skip")
    return traces.replay(
        traces.azure_trace(reader, output_len),
        reader,
        requests,
        rng,
        start=trace_start,
        seconds=trace_seconds,
        speed=trace_speed,
        jitter=trace_jitter,
    )


def _made(generator: Callable[..., list[Conversation]]) -> Callable[..., Workload]:
    @wraps(generator)
    def load(rng: random.Random, requests: int | None, **shape: object) -> Workload:
        return Workload(generator(rng, requests or REQUESTS, **shape), [])

    return load


_TEXTS: dict[str, Callable[..., Workload]] = {
    "multi-turn": _multi_turn,
    **dict.fromkeys(("conversations", "sharegpt", "custom"), _conversations),  # each entry shows its own form
}
_TRACES: dict[str, Callable[..., Workload]] = {
    "mooncake": partial(_hash_trace, timed_trace_chunk_hash_size=512, timed_trace_sec_multiplier=1e-3),
    "bailian": _hash_trace, "timed_trace": _hash_trace, "azure": _azure,
}  # fmt: skip
_GENERATORS: dict[str, Callable[..., Workload]] = {
    "prefix_repetition": _made(generators.prefix_repetition), "chat": _made(generators.chat), "rag": _made(generators.rag),
    "agents": _made(generators.agents), "rollouts": _made(generators.rollouts), "random": _made(generators.random_tokens),
}  # fmt: skip
DATASETS = _TEXTS | _TRACES | _GENERATORS
_TAKES = {
    name: {
        key: flag.default for key, flag in inspect.signature(load).parameters.items() if flag.kind is flag.KEYWORD_ONLY
    }
    for name, load in DATASETS.items()
}  # the flags of each load, with their defaults
_SHAPE = list(dict.fromkeys(key for takes in _TAKES.values() for key in takes))


def add_seeds(parser: argparse.ArgumentParser) -> None:
    flags(
        parser,
        ("--seeds", whole, "N", 1, "run the load with N seeds, from --seed on, and show means with the range over the seeds (default %(default)s)"),
    )  # fmt: skip


def of_seeds(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the flags once per seed."""
    return [argparse.Namespace(**{**vars(args), "seed": args.seed + number}) for number in range(args.seeds)]


def add_workload(parser: argparse.ArgumentParser) -> None:
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
        ("--vocab-size", whole, "N", None,
         f"token ids made up are below this (default: what the model has where its config.json is at hand, {VOCABULARY} at most)"),
    )  # fmt: skip
    group.add_argument(
        "--disable-shuffle", action="store_const", const=True, help="take a file's conversations in their order"
    )
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
        ("--processes", whole, "N", 1, "spread the generator over N processes (default 1)"),
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
    """Return the load's name, guessed from the file's content if no flag gives it. Raises BadOption, BadWorkload."""
    if args.dataset_name is None:
        with _naming_the_flag(args):
            return (args.dataset_path and traces.guess(args.dataset_path)) or "multi-turn"
    return args.dataset_name


@contextmanager
def _naming_the_flag(args: argparse.Namespace) -> Iterator[None]:
    """Prefix an error about the file with the flag that named it."""
    try:
        yield
    except BadWorkload as error:
        raise BadWorkload(f"--dataset-path {error}" if args.dataset_path else str(error)) from None


def shape(args: argparse.Namespace) -> dict[str, object]:
    """Return the flags given that shape the load. Raises BadOption for those that it does not take."""
    name = dataset(args)
    takes = _TAKES[name]
    given = {key: value for key in _SHAPE if (value := getattr(args, key)) is not None}
    if "think_time" not in takes:  # single requests have no pauses
        given.pop("think_time", None)
    for key in given:
        if key not in takes:
            raise BadOption(f"--{key.replace('_', '-')} means nothing to {name}")
    if takes.get("dataset_path") is inspect.Parameter.empty and args.dataset_path is None:
        raise BadOption(f"--dataset-name {name} needs --dataset-path FILE")
    return given


def check(args: argparse.Namespace) -> None:
    """Check before a run which flags exclude each other. Raises BadOption, BadWorkload."""
    name = dataset(args)
    shape(args), _ramp(args)
    if args.replies == "file" and name == "multi-turn":
        raise BadOption("--replies file needs a file of conversations (--dataset-path FILE.jsonl)")
    if args.replies == "engine" and completions(args) and name not in _TEXTS:
        raise BadOption(f"--replies engine: {name} sends token ids, and replies are text; add --backend openai-chat")
    if args.users and (args.request_rate or args.ramp_up_strategy or args.max_concurrency):
        raise BadOption(
            "--users is a closed loop: it goes without --request-rate, --ramp-up-strategy and --max-concurrency"
        )


def completions(args: argparse.Namespace) -> bool:
    """Return whether to use /v1/completions: by the flag, else where prompts are exact token ids, not text."""
    return dataset(args) not in _TEXTS if args.backend is None else args.backend != "openai-chat"


def has_times(args: argparse.Namespace) -> bool:
    """Return whether the load is a trace with its own times."""
    return dataset(args) in _TRACES


def is_a_file(args: argparse.Namespace) -> bool:
    """Return whether the requests come from a file, so that more of them would repeat it."""
    return dataset(args) in _TRACES.keys() | {"conversations", "sharegpt", "custom"}


def vocabulary(args: argparse.Namespace, known: int | None = None) -> int:
    """Return the exclusive upper bound of random token ids; `known` is the size of the model's vocabulary.

    It is at most the default, because many vocabularies have special tokens above it.
    """
    return args.vocab_size or min(known or VOCABULARY, VOCABULARY)


def salt(args: argparse.Namespace) -> int:
    """Return a salt for tokens by seed, load and file, so that a run finds nothing cached from a different one."""
    return args.seed << 32 | zlib.crc32(
        f"{dataset(args)} {args.dataset_path.name if args.dataset_path else ''}".encode()
    )


def workload(args: argparse.Namespace) -> Workload:
    """Return the whole load. Raises BadOption, BadWorkload."""
    rng = random.Random(args.seed)
    name, given = dataset(args), shape(args)
    with _naming_the_flag(args):
        load = DATASETS[name](rng, args.num_prompts, **given)
    if not load.starts or args.users or args.request_rate or args.ramp_up_strategy:
        load.starts = _starts(load.conversations, args, rng)
    return load


def _starts(conversations: list[Conversation], args: argparse.Namespace, rng: random.Random) -> list[float]:
    if args.users:
        return [0.0] * len(conversations)
    turns = [conversation.requests for conversation in conversations]
    return conversation_starts(turns, args.request_rate or RATE, rng, args.burstiness, _ramp(args))


def drawn_for(args: argparse.Namespace) -> dict[str, object] | None:
    """Return the rate and the arrival process for which the start times are drawn.

    Returns None without a rate: with the times of a trace, with users, or with a ramp.
    """
    drawn = args.request_rate or not has_times(args)
    if not drawn or args.users or args.ramp_up_strategy:
        return None
    gaps = {1.0: "Poisson", math.inf: "constant gaps"}.get(args.burstiness, f"burstiness {args.burstiness:g}")
    return {"rate": args.request_rate or RATE, "arrivals": gaps}


def _ramp(args: argparse.Namespace) -> Ramp | None:
    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if any(ends):
            raise BadOption("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if not all(ends) or args.request_rate:
        raise BadOption("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate")
    return Ramp(*ends, args.ramp_up_strategy == "exponential")


def describe(args: argparse.Namespace, load: Workload) -> dict[str, object]:
    """Return all settings of the load, defaults included, for the report."""
    name = dataset(args)
    names = tuple(
        """
        num_prompts request_rate burstiness ramp_up_strategy ramp_up_start_rps ramp_up_end_rps users max_concurrency
        processes seed replies
        """.split()
    )
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
