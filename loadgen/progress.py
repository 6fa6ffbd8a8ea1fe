"""Shows that a run goes on: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import asyncio
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.drive import Run
from loadgen.processes import Processes
from loadgen.records import Record

_BAR_SECONDS, _LINE_SECONDS = 0.2, 10.0
_RECENT = 50


async def watched(run: Run | Processes, console: Console, label: str) -> list[Record]:
    """Run to the end while showing how far it is."""
    view = _bar if console.is_terminal else watch_lines
    viewer = asyncio.create_task(view(run, console, label))
    try:
        return await run.go()
    finally:
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)


def state(run: Run | Processes) -> str:
    """How it goes right now: recent TTFT, requests in flight, failures."""
    recent = sorted(record.ttft for record in run.done[-_RECENT:] if record.ttft is not None)
    failed = sum(record.error is not None for record in run.done)
    return (f"TTFT p50 {recent[len(recent) // 2] * 1000:,.0f} ms · " if recent else "") + \
        f"{len(run.inflight)} in flight" + (f" · {failed} failed" if failed else "")


async def _bar(run: Run | Processes, console: Console, label: str) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("[dim]{task.fields[state]}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(label, total=run.total, state="")
        while True:
            progress.update(task, completed=len(run.done), state=state(run))
            progress.refresh()
            await asyncio.sleep(_BAR_SECONDS)


async def watch_lines(run: Run | Processes, console: Console, label: str) -> None:
    began = perf_counter()
    while True:
        await asyncio.sleep(_LINE_SECONDS)
        console.print(f"{label}: {len(run.done)}/{run.total} after {perf_counter() - began:.0f} s · {state(run)}",
                      highlight=False)
