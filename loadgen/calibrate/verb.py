"""`loadgen calibrate URL`: the command's flags and messages, and the profile file, which states how it was measured."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from time import monotonic

from rich.console import Console

from loadgen.drive.client import base_url
from loadgen.options import INTERRUPTED, flags, positive
from loadgen.report import files

from . import measure
from .ask import CalibrationError, Client, Known, Limits
from .fit import MEANINGS, Fit, fit

DESCRIPTION = """Measure a running engine and write a timing profile that the simulated engine takes: time of prompts by length and
cached prefix, of decode steps by batch and context, of a request's way. The load is bounded and said beforehand. Prompts
are random token ids, so that the engine's own cache knows none of them; they fill it, and what was cached there is evicted.
OPENAI_API_KEY in the environment becomes a bearer token."""
EPILOG = """Use the profile with `hitherto replica --profile FILE` or `hitherto serve --launch 2 --profile FILE`."""
ENOUGH_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.set_defaults(json=None)
    flags(
        parser,
        ("url", base_url, "URL", None, "an OpenAI-compatible engine, best one that serves nobody else now"),
        ("--out", Path, "FILE", Path("calibrated.yaml"), "the profile (default: %(default)s)"),
        ("--seconds", positive, "N", ENOUGH_SECONDS, "about how long to measure (default: %(default)g)"),
        ("--model", str, "NAME", None, "model or adapter to ask for (default: the first the engine lists)"),
        ("--busy", None, None, False, "measure even if others' requests are in the engine"),
        ("--seed", int, "N", None, "of the random prompts; the same again finds them cached"),
    )


async def calibrate_verb(args: argparse.Namespace, console: Console) -> int:
    files.check_writable(args.out, "--out")
    try:
        text = await calibrate(args, console)
    except asyncio.CancelledError:
        told = "interrupted; nothing was written, and no request of ours is left in the engine"
        print(f"loadgen calibrate: {told}", file=sys.stderr)
        return INTERRUPTED
    try:
        args.out.write_text(text)
    except OSError as error:  # despite the check before the measurement
        console.print(f"\n{text}", markup=False, soft_wrap=True)
        why = f"{args.out} cannot be written: {error.strerror}; the profile is printed above"
        raise CalibrationError(why) from None
    console.print(f"\nwritten: {args.out}\n{EPILOG.replace('FILE', str(args.out))}", markup=False, soft_wrap=True)
    return 0


async def calibrate(args: argparse.Namespace, console: Console) -> str:
    """Measure the engine, print progress, and return the profile as YAML. Raises CalibrationError."""

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    async with Client(args.url, os.environ.get("OPENAI_API_KEY"), args.seed) as client:
        known = await client.learn(args.model)
        say(f"{client.base_url}: {known.model} on {known.engine} {known.version}, {known.machine}")
        count = await client.at_work()
        if count is None:
            say("the engine does not report how many requests it has (/metrics): make sure that nobody else uses it")
        elif count and not args.busy:
            raise CalibrationError(
                f"the engine is serving others ({count} requests), which would be measured too. Take it out of traffic, "
                "or measure anyway with --busy"
            )
        meter = measure.Meter(client, known.limits)
        say("probing how fast it is ...")
        found = await meter.probe(args.seconds)
        meter.limits = limits = await _limits(meter, found, args.seconds)
        for name, source in limits.told.items():
            say(f"  {name:24} {getattr(limits, name):8,}  {source}")
        work = measure.make(limits, found, args.seconds)
        say(
            "will send {:,} requests with {:,} prompt tokens and {:,} of output in ".format(*work.sent)
            + f"{work.rounds} rounds, about {work.rounds * work.round_seconds:.0f} s; it ends earlier once the times no "
            "longer change"
        )
        began, before, sent = monotonic(), await client.counters(), client.prompt_tokens

        def progress(done: int, found: Fit) -> None:
            region, worst = max(found.residuals.items(), key=lambda item: item[1].typical)
            say(f"  round {done}: typical error of the fit at most {worst.typical * 100:.0f} % ({region})")

        seen = await meter.run(work, args.seconds, progress, args.busy)
        after, sent = await client.counters(), client.prompt_tokens - sent
        if before and after and None not in (before.prefix_queries, after.prefix_queries):
            looked_up = after.prefix_queries - before.prefix_queries
            if looked_up > 1.05 * sent:
                used = f"the engine looked up {looked_up:,} prompt tokens while we sent {sent:,}: others used it too"
                print(f"WARNING: {used}", file=sys.stderr)
        result = fit(seen)
        say("\n" + "\n".join(residuals(result)))
        if caution := _caution(result, args.seconds):
            say(f"\n{caution}")
        total = (
            f"{client.requests:,} requests, {client.prompt_tokens:,} prompt tokens, {client.output_tokens:,} of output"
        )
        facts = {
            "date": f"{date.today():%Y-%m-%d}",
            "command": shlex.join(["loadgen", *sys.argv[1:]]),
            "sent": f"{total} in {monotonic() - began:.0f} s",
        }
        return profile(known, limits, result, facts)


async def _limits(meter: measure.Meter, found: Fit, seconds: float) -> Limits:
    """Return the engine's limits; the scheduler's limits are measured if the engine did not report them.

    `found`: the fit of the probes; `seconds`: duration of the whole measurement.
    """
    limits = meter.limits
    for name, see in (
        ("max_num_seqs", meter.at_once),
        ("max_num_batched_tokens", lambda: meter.budget(found, seconds)),
    ):
        if limits.told[name] == "assumed":
            value, source = await see()
            limits = replace(limits, **{name: value}, told=limits.told | {name: source})
    return replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs))


def _caution(result: Fit, seconds: float) -> str:
    """Return advice on a poor fit, or "" for a good one.

    `seconds`: the planned duration of the measurement; if it was short, the advice is to plan more.
    """
    if not result.poor:
        return ""
    longer = f"give --seconds {ENOUGH_SECONDS:g}, and let" if seconds < ENOUGH_SECONDS else "measure again, and let"
    return f"These errors are large ({', '.join(result.poor)}): {longer} the machine do nothing else."


def residuals(fit: Fit) -> Iterator[str]:
    """Yield the lines of a table of the fit's errors, one line per kind of measurement.

    Columns: samples, bias (median of fit / measured - 1), typical error (median), error that nine in ten stay below.
    """
    yield f"{'':38}{'samples':>8}{'bias':>11}{'typical':>11}{'90 %':>11}"
    for region, one in fit.residuals.items():
        figures = f"{one.bias * 100:+9.1f} %{one.typical * 100:9.1f} %{one.worst_tenth * 100:9.1f} %"
        yield f"{region:38}{one.count:8}{figures}"


def profile(known: Known, limits: Limits, fit: Fit, facts: Mapping[str, str]) -> str:
    """Return the timing profile as YAML, which `replicas.simulated.profile.load_profile` reads.

    `facts`: entries of the header comment by name, such as date and command.
    """
    head = [f"{known.engine} {known.version} with {known.model} on {known.machine}, measured by `loadgen calibrate`."]
    head += [f"{name}: {value}" for name, value in facts.items()]
    head += [
        "",
        "Fit against what was measured, by kind of request: samples; bias (median of fit / measured - 1), typical",
    ]
    head += ["error (median), and the error that nine in ten stay below:", *residuals(fit)]
    lines = [f"# {line}".rstrip() for line in head]
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        lines.append(f"{name}: {getattr(limits, name)}  # {limits.told[name]}")
    titles = {"latency": "request:", "base": "step:"}  # by the coefficient that each stands before
    spread = {"spread": "a share, not a time: a step's standard deviation"}
    for name, meaning in (MEANINGS | spread).items():
        value = fit.spread if name == "spread" else fit.ms[name]
        number = re.sub(r"^(\d+)e", r"\1.0e", f"{value:.4g}")  # YAML reads 1e-05 as text
        lines += [titles[name]] if name in titles else []
        lines.append(f"  {name}: {number}  # {meaning}{'' if value else '; too small to measure'}")
    return "\n".join(lines) + "\n"
