"""`loadgen demo` (`make demo`, `make demo-vllm`): play the same conversations under two routing policies.

Gateway, tokens, block hashes, KV events and HTTP are real; the engines are simulated, or real with `--vllm` (`scenes`).
The KV caches of all engines together have room for all texts of the conversations. The cache of a single engine has
not, so that routing matters.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from loadgen import options
from loadgen.demo import live
from loadgen.demo.scenes import SIMULATED, Scene, real
from loadgen.drive import engines
from loadgen.drive.client import Client
from loadgen.drive.run import Asking, Run
from loadgen.drive.stack import Stack
from loadgen.drive.target import model_of, stopped_by_interrupt
from loadgen.report import files, show
from loadgen.report.comparison import print_table
from loadgen.report.progress import watched
from loadgen.report.summary import Report, Reports, exit_code, now, setting, summarise
from loadgen.run import until_interrupted
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import BadWorkload, Conversation
from loadgen.workload.documents import Document, documents, read_text
from loadgen.workload.texts import multi_turn
from replicas.pipes import refuse_pipe

POLICIES = ("round_robin", "least_time")
LEAST_CHARS = 2000  # minimum length of a text cut from a short file
TALKS = 4  # conversations that the live view shows
QUESTION = "Which module reads CSV?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.flags(
        parser,
        ("--file", Path, "FILE", None, "a text to talk about (default: the standard library's documentation)"),
        ("--num-prompts", options.whole, "N", None, f"requests per policy (default {SIMULATED.requests}, fewer with --vllm)"),
        ("--vllm", Path, "FOLDER", None, "real engines: an environment with vLLM for the CPU (`make demo-vllm` makes one)"),
        ("--seed", int, None, 0, "same seed, same conversations (default %(default)s)"),
        ("--json", Path, "FILE", None, "write all figures"),
    )  # fmt: skip


@dataclass(slots=True)
class Plan:
    """The texts of a demo, and the KV cache size of its engines."""

    scene: Scene
    documents: list[Document]
    num_blocks: int  # KV blocks of each engine

    @property
    def tokens(self) -> int:
        return int(sum(len(document.text) for document in self.documents) / self.scene.chars_per_token)

    @property
    def profile(self) -> str:
        """The launch profile of the engines, as YAML."""
        return self.scene.launch_profile(self.num_blocks)


def plan(path: Path | None, scene: Scene = SIMULATED) -> Plan:
    """Return the demo's texts and a KV cache size that suits them. Raises BadWorkload.

    `path`: a file to cut the texts from; None: the standard library's documentation.
    """
    length = scene.text_chars
    try:
        if path is not None:  # texts of a short file are shorter, so that there are still several
            try:
                refuse_pipe(path)
            except OSError as error:
                raise BadWorkload(f"{path}: {error.strerror}; name a UTF-8 text") from None
            length = min(length, max(LEAST_CHARS, len(read_text(path)) // scene.texts))
        texts = documents(path, scene.texts, length)
    except BadWorkload as error:
        raise BadWorkload(f"--file {error}" if path is not None else str(error)) from None
    tokens = sum(len(document.text) for document in texts) / scene.chars_per_token
    longest = max(len(document.text) for document in texts) / scene.chars_per_token
    least = scene.running * (longest + scene.talk_tokens)  # tokens that the running conversations need
    return Plan(scene, texts, math.ceil(max(scene.pressure * tokens / scene.engines, least) / scene.block))


def load(planned: Plan, requests: int, seed: int) -> tuple[list[Conversation], list[float]]:
    rng, scene = random.Random(seed), planned.scene
    conversations = multi_turn(planned.documents, requests, scene.turns, scene.think, scene.reply_tokens, rng)
    return conversations, conversation_starts([len(item.turns) for item in conversations], scene.rate, rng)


async def demo_verb(args: argparse.Namespace, console: Console) -> int:
    files.check_writable(args.json)
    scene = real(args.vllm) if args.vllm else SIMULATED
    planned, requests = plan(args.file, scene), args.num_prompts or scene.requests
    introduce(console, planned, args.file, requests)
    reports: dict[str, Report] = {}
    with tempfile.TemporaryDirectory(prefix="loadgen-demo-") as folder:
        profile = Path(scene.folder or folder, "demo.yaml")
        profile.write_text(planned.profile)
        with until_interrupted(console):
            for number, policy in enumerate(POLICIES, 1):
                which = f"{number} of {len(POLICIES)}"
                report = reports[policy] = await play(console, planned, requests, args.seed, policy, profile, which)
                console.print(live.result(policy, report), soft_wrap=True)
                if report["interrupted"]:
                    break
    if not reports:
        return options.INTERRUPTED
    conclude(console, reports)
    next_steps(console, scene)
    files.write_json(
        args.json, {"targets": reports, "setting": setting(["loadgen", *sys.argv[1:]], args.seed, date=now())}, console
    )
    return exit_code(reports.values(), len(reports) == len(POLICIES))


async def play(
    console: Console, planned: Plan, requests: int, seed: int, policy: str, profile: Path, which: str
) -> Report:
    """Play one round: send the load under one policy to fresh engines, and return the report.

    `requests`: number of requests; `profile`: file with the launch profile of the engines; `which`: the round in words,
    such as "1 of 2", for the live view.
    """
    scene = planned.scene
    with live.starting(console, policy, scene.engines) as on_progress:
        stack = Stack(policy, scene.engines, str(profile), on_progress, scene.model, scene.ready_seconds)
        await stack.__aenter__()
    try:
        conversations, starts = load(planned, requests, seed)
        client = Client(stack.base_url)
        asking = Asking(await model_of(client, None), engine_replies=True, ignore_eos=scene.model is not None)
        run = Run(conversations, starts, client, asking)
        before = await engines.cache_counts(stack.admin)
        with stopped_by_interrupt(run):
            await watched(run, console, f"{policy}, {which}", TALKS)
        counted = engines.between(before, await engines.cache_counts(stack.admin))
        client.close()
        return {**summarise(run), "engines": counted}
    finally:
        await stack.__aexit__()


def introduce(console: Console, planned: Plan, file: Path | None, requests: int) -> None:
    scene, texts = planned.scene, len(planned.documents)
    about = escape(str(file)) if file else "Python's standard library"
    held = planned.num_blocks * scene.block / max(planned.tokens, 1)
    room = (
        f"the cache of one holds {held * 100:.0f} % of the texts"
        if held < 1
        else "the cache of one holds all the texts, so policies will differ less than with a longer file"
    )
    console.print()
    console.print("[bold]Hitherto[/]  each request goes to the replica that already holds its prefix")
    console.print()
    console.print(
        f"{requests} questions in conversations about {texts} texts from {about}, some "
        f"{planned.tokens // max(texts, 1):,} tokens each. {scene.engines} engines; {room}. "
        f"The same conversations run twice, on fresh engines: first dealt out in "
        f"turn ({POLICIES[0]}), then by {POLICIES[1]}.",
        width=min(console.width, 92),
    )
    console.print(f"[dim]{scene.about}[/]", width=min(console.width, 92))
    console.print()


def conclude(console: Console, reports: Reports) -> None:
    print_table(console, reports, show.DEMO_ROWS)
    show.print_troubles(console, reports)


def next_steps(console: Console, scene: Scene) -> None:
    hitherto, loadgen, name = command("hitherto"), command("loadgen"), scene.model.name if scene.model else "sim"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
    launch = ("start it with simulated engines", f"{hitherto} serve --launch 4 --profile sim")
    again, engines = f"{loadgen} demo --file FILE", "http://HOST:8000 http://HOST:8001"
    if scene.model:
        fleet = f"--launch {scene.engines} --profile {scene.folder / 'demo.yaml'}"
        launch = ("start these engines again", f"{hitherto} serve {fleet} --model {scene.model}")
        again = "make demo-vllm ARGS='--file FILE'"
    steps = [
        launch,
        (
            "talk to it",
            f"curl -i http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        ),
        ("send it a load", f"{loadgen} run --base-url http://127.0.0.1:8080"),
        ("see where a request would go, and why", f"echo '{body}' | {hitherto} explain -"),
        ("compare other policies", f"{loadgen} compare --policies least_load,prefix_affinity,least_time"),
        ("talk about a text of your own", again),
        ("put it before your own vLLM", f"{hitherto} serve --replica-url {engines}"),
        ("see which flags your engines lack", f"{hitherto} doctor --replica-url {engines}"),
    ]
    console.print()
    console.print("[bold]What to type next[/]")
    for what, typed in steps:
        console.print(f"  [dim]{what:<38}[/] {escape(typed)}", soft_wrap=True)
    console.print()


def command(name: str) -> str:
    """Return what to type to run a command: its bare name if that finds this installation's command, else its path."""
    here = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if (found and Path(found).resolve() == here.resolve()) or not here.exists():
        return name
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)
