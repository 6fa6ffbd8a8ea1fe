"""The live view of a run: redrawn in place on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from time import perf_counter

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.drive.records import Record
from loadgen.drive.run import Run
from loadgen.report import show
from loadgen.report.shares import percent

_FRAME_SECONDS, _LINE_SECONDS, _WINDOW_SECONDS = 0.5, 10.0, 10.0  # a frame takes the generator about 5 ms
_WIDTH = 92
_MOST_ROWS = _MOST_DOTS = 16


async def watched(
    run: Run, console: Console, label: str, view: View | None = None, every: float | None = None
) -> list[Record]:
    """Run the load to its end while showing its progress; return its records."""
    view = view or View(run, label)
    shown = _redrawn(view, console, every or _FRAME_SECONDS) if console.is_terminal else watch_lines(view, console)
    viewer = asyncio.create_task(shown)
    try:
        return await run.go()
    finally:
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)


async def _redrawn(view: View, console: Console, every: float) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while True:
            screen.update(view.frame(min(console.width, _WIDTH)), refresh=True)
            await asyncio.sleep(every)


async def watch_lines(view: View, console: Console) -> None:
    began = perf_counter()
    while True:
        await asyncio.sleep(_LINE_SECONDS)
        now, run = perf_counter(), view.run
        ttft = view.figures(now)["TTFT p50"]
        said = (
            f"{len(run.done)}/{run.total} after {now - began:.0f} s · TTFT p50 {ttft} · {len(run.inflight)} in flight"
        )
        console.print(f"{view.label}: {said}{f' · {view.failed} failed' if view.failed else ''}", highlight=False)


class View:
    """The live view of a run; it keeps running sums, so that a redraw costs only the new records."""

    def __init__(self, run: Run, label: str):
        self.run, self.label = run, label
        self.counted = self.failed = 0
        self.requests: Counter[str] = Counter()  # these three are counted by replica
        self.prompt: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()
        self.recent: deque[Record] = deque()  # ended in the last seconds, roughly in order

    def frame(self, width: int, now: float | None = None) -> RenderableType:
        now = perf_counter() if now is None else now
        figures = Table.grid(padding=(0, 2, 0, 0))
        for name, figure in self.figures(now).items():
            figures.add_row(Text(name, "dim"), Text(figure, "bold"))
        head = Text.assemble((self.label, "bold"), (f"   {len(self.run.inflight)} in flight", "dim"))
        if self.failed:
            head.append(f"   {self.failed} failed", "bold red")
        parts: list[RenderableType] = [head, Text(), figures]
        if any(self.requests):  # replies name their replicas
            parts += [Text(), self.replicas("replica", "in flight")]
        return Group(*parts, Text(), self.bar(width - 24, Text(self.clock(now))))

    def figures(self, now: float) -> dict[str, str]:
        """Count the records since the last call, and return the figures of the last ten seconds as text."""
        for record in self.run.done[self.counted :]:
            name = record.replica or ""
            self.requests[name] += 1
            self.recent.append(record)
            self.failed += record.error is not None
            if record.error is None and record.prompt_tokens is not None and record.cached_tokens is not None:
                self.prompt[name] += record.prompt_tokens
                self.cached[name] += record.cached_tokens
        self.counted = len(self.run.done)
        while self.recent and self.recent[0].last < now - _WINDOW_SECONDS:
            self.recent.popleft()
        seconds = min(max(now - self.run.began, 1e-9), _WINDOW_SECONDS)
        good = [record for record in self.recent if record.error is None]
        ttft = [record.ttft * 1000 for record in good if record.ttft is not None]
        told = [record for record in good if record.prompt_tokens and record.cached_tokens is not None]
        prompt, cached = (sum(getattr(one, key) for one in told) for key in ("prompt_tokens", "cached_tokens"))
        return {
            "requests/s": f"{len(good) / seconds:,.1f}",
            "output tokens/s": show.count(sum(record.outputs for record in good) / seconds),
            **{f"TTFT p{at}": show.milliseconds(np.percentile(ttft, at) if ttft else None) for at in (50, 99)},
            "cache hit rate": show.percent(cached / prompt if prompt else None),
        }

    def clock(self, now: float) -> str:
        return f"{len(self.run.done)}/{self.run.total}  {max(0.0, now - self.run.began) if self.run.began else 0:.0f} s"

    def bar(self, width: int, text: Text) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        done = ProgressBar(max(1, self.run.total), len(self.run.done), max(10, width), complete_style="cyan")
        grid.add_row(done, text)
        return grid

    def replicas(self, title: str, busy_title: str) -> Table:
        """Return a table with a row per replica: requests, hit rate, and a dot per request in flight, if known."""
        busy = Counter(record.replica for record in self.run.inflight.values() if record.replica)
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for heading, justify in ((title, "left"), ("requests", "right"), ("from its cache", "left"), ("", "right")):
            table.add_column(heading, justify=justify, no_wrap=True)
        table.add_column(busy_title, no_wrap=True, min_width=_MOST_DOTS)
        names = sorted(set(self.requests) | set(busy), key=lambda name: (len(name), name))
        for name in names[:_MOST_ROWS]:
            rate = self.cached[name] / (self.prompt[name] or 1)
            bar = ProgressBar(1, rate, 24, complete_style="green", finished_style="green")
            dots = Text("●" * min(busy[name], _MOST_DOTS), "cyan")
            table.add_row(name or "server", str(self.requests[name]), bar, percent(rate, 0), dots)
        if len(names) > _MOST_ROWS:
            table.add_row(Text(f"and {len(names) - _MOST_ROWS} more", "dim"))
        return table
