"""Command line: `hitherto calibrate URL`."""

import argparse
import asyncio
import errno
import os
import shlex
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from time import monotonic

from ..replica import parse_url
from ..simulated import complaints
from . import plan, write
from .client import CalibrationError, Client
from .fit import Fit, fit
from .learn import at_work, learn, looked_up
from .measure import Meter

DESCRIPTION = """Measure a running engine and write a timing profile that the simulated engine takes: time of prompts by length and
cached prefix, of decode steps by batch and context, of a request's way. The load is bounded and said beforehand. Prompts
are random token ids, so that the engine's own cache knows none of them; they fill it, and what was cached there is evicted.
OPENAI_API_KEY in the environment becomes a bearer token."""
EPILOG = """Use the profile with `hitherto replica --profile FILE` or `hitherto serve --launch 2 --profile FILE`."""
ENOUGH_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("url", metavar="URL", help="an OpenAI-compatible engine, best one that serves nobody else now")
    parser.add_argument(
        "--out", type=Path, default=Path("calibrated.yaml"), metavar="FILE", help="the profile (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=complaints.positive,
        default=ENOUGH_SECONDS,
        metavar="N",
        help="about how long to measure (default: %(default)g)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model or adapter to ask for (default: the first the engine lists)"
    )
    parser.add_argument("--busy", action="store_true", help="measure even if others' requests are in the engine")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random prompts; the same again finds them cached")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: written; 1: it could not be measured, or not be written any more; 2: a flag cannot be used;
    130: interrupted, nothing is written."""
    try:
        args.url = parse_url(args.url).url
        check_savable(args.out)
    except ValueError as error:
        print(f"hitherto calibrate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hitherto calibrate: --out {args.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    try:
        text = asyncio.run(calibrate(args))
    except CalibrationError as error:
        print(f"hitherto calibrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "hitherto calibrate: interrupted; nothing was written, and no request of ours is left in the engine",
            file=sys.stderr,
        )
        return 130
    try:
        save(args.out, text)
    except OSError as error:  # it could be written when the measurement began
        print(f"\n{text}")
        print(
            f"hitherto calibrate: {args.out} cannot be written: {error.strerror}; the profile is printed above",
            file=sys.stderr,
        )
        return 1
    print(f"\nwritten: {args.out}\n{EPILOG.replace('FILE', str(args.out))}")
    return 0


async def calibrate(args: argparse.Namespace) -> str:
    """The profile's text."""
    async with Client(args.url, os.environ.get("OPENAI_API_KEY"), args.seed) as client:
        known = await learn(client, args.model)
        print(f"{client.url}: {known.model} on {known.engine} {known.version}, {known.machine}")
        await _refuse_if_busy(client, args.busy)
        meter = Meter(client, known.limits)
        print("probing how fast it is ...", flush=True)
        found = await meter.probe(args.seconds)
        meter.limits = limits = await _limits(meter, found, args.seconds)
        for name, source in limits.told.items():
            print(f"  {name:24} {getattr(limits, name):8,}  {source}")
        work = plan.make(limits, found, args.seconds, text=True)
        print(f"will send {work.requests:,} requests with {work.prompt_tokens:,} prompt tokens and {work.output_tokens:,} of output in "
              f"{work.rounds} rounds, about {work.rounds * work.round_seconds:.0f} s; it ends earlier once the times no longer change", flush=True)  # fmt: skip
        began, before, sent = monotonic(), await looked_up(client), client.prompt_tokens
        seen = await meter.run(
            work, args.seconds, lambda done, found: print(_progress(done, found), flush=True), args.busy
        )
        _warn_of_others(before, await looked_up(client), client.prompt_tokens - sent)
        result = fit(seen)
        _show(result)
        if caution := _caution(result, args.seconds):
            print(f"\n{caution}")
        facts = {"date": f"{date.today():%Y-%m-%d}", "command": shlex.join(["hitherto", *sys.argv[1:]]),
                 "sent": f"{client.requests:,} requests, {client.prompt_tokens:,} prompt tokens, {client.output_tokens:,} of output "
                         f"in {monotonic() - began:.0f} s"}  # fmt: skip
        return write.profile(known, limits, result, facts)


async def _refuse_if_busy(client: Client, busy: bool) -> None:
    count = await at_work(client)
    if count is None:
        print("the engine does not report how many requests it has (/metrics): make sure that nobody else uses it")
    elif count and not busy:
        raise CalibrationError(f"the engine is serving others ({count} requests), which would be measured with ours. Take it "
                               "out of traffic, or measure anyway with --busy")  # fmt: skip


async def _limits(meter: Meter, found: Fit, seconds: float) -> plan.Limits:
    """What the engine did not tell, as far as it can be seen."""
    limits = meter.limits
    for name, see in (("max_num_seqs", meter.at_once()), ("max_num_batched_tokens", meter.budget(found, seconds))):
        if limits.told[name] == "assumed":
            value, source = await see
            limits = replace(limits, **{name: value}, told=limits.told | {name: source})
        else:
            see.close()
    return replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs))


def _warn_of_others(before: int | None, after: int | None, sent: int) -> None:
    if before is not None and after is not None and after - before > 1.05 * sent:
        print(
            f"WARNING: the engine looked up {after - before:,} prompt tokens while we sent {sent:,}: others used it too",
            file=sys.stderr,
        )


def _progress(done: int, found: Fit) -> str:
    worst = max(found.residuals.items(), key=lambda item: item[1].typical)
    return f"  round {done}: typical error of the fit at most {worst[1].typical * 100:.0f} % ({worst[0]})"


def _show(result: Fit) -> None:
    print(f"\n{'':38}{'samples':>8}{'bias':>9}{'typical':>9}{'90 %':>9}")
    for region, one in result.residuals.items():
        figures = f"{one.bias * 100:+7.1f} %{one.typical * 100:7.1f} %{one.worst_tenth * 100:7.1f} %"
        print(f"{region:38}{one.count:8}{figures}")


def _caution(result: Fit, seconds: float) -> str:
    """What to do about a fit that is poor; nothing about one that is not."""
    if not result.poor:
        return ""
    longer = f"give --seconds {ENOUGH_SECONDS:g}, and let" if seconds < ENOUGH_SECONDS else "measure again, and let"
    return f"These errors are large ({', '.join(result.poor)}): {longer} the machine do nothing else."


def check_savable(path: Path) -> None:
    """Raises ValueError or OSError where `save` could not write to `path`. Leaves nothing behind."""
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise ValueError(f"--out {path}: no folder {folder}")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):  # `save` would put a file in the place of a device
            raise OSError(errno.EINVAL, "it is no regular file")
    with tempfile.TemporaryFile(dir=folder):  # by doing it: a file system that is mounted read-only shows no other way
        pass


def save(path: Path, text: str) -> None:
    """Whole or not at all. Raises OSError."""
    real = Path(os.path.realpath(path))  # a link stays one
    descriptor, name = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, real)
    except OSError:
        os.unlink(name)
        raise
