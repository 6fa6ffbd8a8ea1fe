"""`loadgen demo` (`make demo`): the same conversations under two policies, side by side.

What is real: gateway, tokens, block hashes, KV events, HTTP. What is simulated: the engines'
arithmetic, at SPEED times Dynamo's figures for an 8B model on one GPU.

Sized so that two cores carry four engines, the gateway and this generator, about 40 s a round: 10
requests/s of 4,000 tokens, 40-token replies. The caches together hold PRESSURE times all texts,
one alone 38 % of them: the situation in which it matters where a request goes. On a virtual clock
(`loadgen.simulate`, 240 requests) that gives hit rates of .35 and .90 where .90 is possible, TTFT
p50 of 224 and 105 ms, and queues under neither policy that would only measure saturation.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from loadgen import engines, live, options, show, words
from loadgen.arrivals import conversation_starts
from loadgen.client import Client
from loadgen.drive import Asking, Run
from loadgen.report import setting, summarise
from loadgen.serving import model_of, stop_on_interrupt
from loadgen.sources import Document, read_text
from loadgen.stack import Stack
from loadgen.workloads import CHARS_PER_TOKEN, Conversation, multi_turn

POLICIES = ("round_robin", "least_time")
ENGINES = 4
TEXTS, TEXT_TOKENS, LEAST_TOKENS = 24, 4000, 500
REQUESTS, RATE, TURNS, THINK, REPLY_TOKENS = 220, 10.0, 4, 1.0, 40
PRESSURE, SPEED = 1.5, 0.5
RUNNING, TALK_TOKENS = 4, 500  # conversations an engine has at a time, and their tokens besides the text
BLOCK = 16
BODY = '{"model": "sim", "messages": [{"role": "user", "content": "Which module reads CSV?"}]}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, metavar="FILE",
                        help="a text to talk about (default: the standard library's documentation)")
    parser.add_argument("--num-prompts", type=options.whole, default=REQUESTS, metavar="N",
                        help="requests per policy (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same conversations (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


@dataclass(slots=True)
class Plan:
    documents: list[Document]
    num_blocks: int  # per engine

    @property
    def tokens(self) -> int:
        return sum(len(document.text) for document in self.documents) // CHARS_PER_TOKEN

    @property
    def profile(self) -> str:
        """The launch profile, YAML."""
        return f"engine: sim\ntiming: gpu-8b\nspeedup: {SPEED}\nnum_blocks: {self.num_blocks}\n"


def plan(path: Path | None) -> Plan:
    """The texts, and caches sized to them. Raises BadSource."""
    tokens = TEXT_TOKENS
    if path is not None:  # a short file is cut into shorter texts, so that there are still several
        tokens = min(TEXT_TOKENS, max(LEAST_TOKENS, len(read_text(path)) // CHARS_PER_TOKEN // TEXTS))
    documents = options.texts(path, TEXTS, tokens)
    tokens = sum(len(document.text) for document in documents) // CHARS_PER_TOKEN
    longest = max(len(document.text) for document in documents) // CHARS_PER_TOKEN
    least = RUNNING * (longest + TALK_TOKENS)  # what the running conversations need in any case
    return Plan(documents, math.ceil(max(PRESSURE * tokens / ENGINES, least) / BLOCK))


def load(planned: Plan, requests: int, seed: int) -> tuple[list[Conversation], list[float]]:
    rng = random.Random(seed)
    conversations = multi_turn(planned.documents, requests, TURNS, THINK, REPLY_TOKENS, rng)
    return conversations, conversation_starts([len(item.turns) for item in conversations], RATE, rng)


async def demo_verb(args: argparse.Namespace, console: Console) -> int:
    options.check_writable(args.json)
    planned = plan(args.file)
    introduce(console, planned, args)
    reports: dict[str, Mapping[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="loadgen-demo-") as folder:
        profile = Path(folder, "demo.yaml")
        profile.write_text(planned.profile)
        for number, policy in enumerate(POLICIES, 1):
            report = await play(args, console, planned, policy, str(profile), f"{number} of {len(POLICIES)}")
            reports[policy] = report
            console.print(live.result(policy, report), soft_wrap=True)
            if report["interrupted"]:
                break
    conclude(console, reports)
    options.write_json(args.json, {"targets": reports, "setting": setting(["loadgen", *sys.argv[1:]], args.seed)}, console)
    whole = len(reports) == len(POLICIES) and all(report["completed"] for report in reports.values())
    return 0 if whole else 1


async def play(args: argparse.Namespace, console: Console, planned: Plan, policy: str, profile: str,
               which: str) -> Mapping[str, object]:
    """One round: fresh engines, the load, the figures."""
    with live.starting(console, policy, ENGINES) as on_progress:
        stack = Stack(policy, ENGINES, profile, isolated=True, on_progress=on_progress)
        await stack.__aenter__()
    try:
        conversations, starts = load(planned, args.num_prompts, args.seed)
        client = Client(stack.base_url)
        run = Run(conversations, starts, client, Asking(await model_of(client, None), engine_replies=True))
        stop_on_interrupt(run)
        await live.watched(run, console, policy, which)
        counted = engines.between({}, await engines.cache_counts(stack.admin))
        client.close()
        return {**summarise(run), "engines": counted}
    finally:
        await stack.__aexit__()


def introduce(console: Console, planned: Plan, args: argparse.Namespace) -> None:
    about = escape(str(args.file)) if args.file else "Python's standard library"
    held = planned.num_blocks * BLOCK / max(planned.tokens, 1)
    room = f"the cache of one holds {held * 100:.0f} % of the texts" if held < 1 else \
        "the cache of one holds all the texts, so policies will differ less than with a longer file"
    console.print()
    console.print("[bold]Hitherto[/]  each request goes to the replica that already holds its prefix")
    console.print()
    console.print(
        f"{args.num_prompts} questions in conversations about {len(planned.documents)} texts from {about}, some "
        f"{planned.tokens // max(len(planned.documents), 1):,} tokens each. {ENGINES} engines; {room}. "
        f"The same conversations run twice, on fresh engines: first dealt out in "
        f"turn ({POLICIES[0]}), then by {POLICIES[1]}.", width=min(console.width, 92))
    console.print(
        "[dim]The gateway, its tokens, KV events and HTTP are real. The engines are simulated: vLLM's scheduler and "
        "prefix cache, with the step times of an 8B model on one GPU (Dynamo's figures, at half their speed); "
        "their replies are nonsense in real tokens.[/]", width=min(console.width, 92))
    console.print()


def conclude(console: Console, reports: Mapping[str, Mapping[str, object]]) -> None:
    console.print(show.comparison_table(reports, show.DEMO_ROWS))
    if len(reports) == len(POLICIES):
        base, other = POLICIES
        console.print(show.bullets(words.comparison(other, reports[other], base, reports[base])), width=min(console.width, 96))
    for name, report in reports.items():
        for trouble in filter(None, (show.errors(report), show.caution(report))):
            console.print(f"\n[bold]{name}[/]")
            console.print(trouble)
    next_steps(console)


def next_steps(console: Console) -> None:
    console.print()
    console.print("[bold]What to type next[/]")
    hitherto, loadgen = command("hitherto"), command("loadgen")
    for what, typed in (
        ("put it before your own vLLM", f"{hitherto} serve --replica-url http://HOST:8000 http://HOST:8001"),
        ("or before simulated engines", f"{hitherto} serve --launch 4 --profile sim"),
        ("talk to it", f"curl -i http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d '{BODY}'"),
        ("send it a load", f"{loadgen} run --base-url http://127.0.0.1:8080"),
        ("see where a request would go, and why", f"echo '{BODY}' | {hitherto} explain -"),
        ("compare other policies", f"{loadgen} compare --policies least_load,prefix_affinity,least_time"),
        ("talk about a text of your own", f"{loadgen} demo --file FILE"),
    ):
        console.print(f"  [dim]{what:<38}[/] {escape(typed)}", soft_wrap=True)
    console.print()


def command(name: str) -> str:
    """How to type a command from here: its bare name if that finds this installation's."""
    here = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found and Path(found).resolve() == here.resolve() or not here.exists():
        return name
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)
