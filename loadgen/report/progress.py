"""The live view of a run: redrawn in place on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.drive.processes import Processes
from loadgen.drive.records import Record
from loadgen.drive.run import Run
from loadgen.report import show
from loadgen.report.shares import percent

_FRAME_SECONDS, _LINE_SECONDS = 0.5, 10.0  # a frame takes the generator about 5 ms
_WIDTH = 92
_RECENT = 50
_WINDOW_SECONDS, _SAMPLE_SECONDS = 10.0, 1.0
_SPARK_WIDTH = 32
_MOST_ROWS = 16  # replicas
_MOST_DOTS = 16
_SPARKS = "▁▂▃▄▅▆▇█"


async def watched(
    run: Run | Processes, console: Console, label: str, view: View | None = None, every: float | None = None
) -> list[Record]:
    """Run the load to its end while showing its progress; return its records."""
    viewer = asyncio.create_task(
        _redrawn(view or View(run, label), console, every or _FRAME_SECONDS)
        if console.is_terminal
        else watch_lines(run, console, label)
    )
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


def state(run: Run | Processes) -> str:
    """Return the current state in words: recent TTFT, requests in flight, failures."""
    recent = sorted(record.ttft for record in run.done[-_RECENT:] if record.ttft is not None)
    failed = sum(record.error is not None for record in run.done)
    return (
        (f"TTFT p50 {recent[len(recent) // 2] * 1000:,.0f} ms · " if recent else "")
        + f"{len(run.inflight)} in flight"
        + (f" · {failed} failed" if failed else "")
    )


async def watch_lines(run: Run | Processes, console: Console, label: str) -> None:
    began = perf_counter()
    while True:
        await asyncio.sleep(_LINE_SECONDS)
        console.print(
            f"{label}: {len(run.done)}/{run.total} after {perf_counter() - began:.0f} s · {state(run)}", highlight=False
        )


class View:
    """The live view of a run; it keeps running sums, so that a frame costs only the new records."""

    def __init__(self, run: Run | Processes, label: str):
        self.run, self.label = run, label
        self.counted = self.failed = self.outputs = 0
        self.requests: dict[str, int] = {}
        self.prompt: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.ttft: list[float] = []  # ms, of all so far
        self.recent: deque[Record] = deque()  # ended in the last seconds, roughly in order
        self.figures: list[tuple[str, str, str, str]] = []  # name, now, so far, sparkline
        self.past: dict[str, list[float]] = {}
        self.sampled = 0.0

    def frame(self, width: int, now: float | None = None) -> RenderableType:
        now = perf_counter() if now is None else now
        self.count()
        if now - self.sampled >= _SAMPLE_SECONDS:
            self.sampled = now
            self._sample(now)
        head = Text.assemble((self.label, "bold"), (f"   {len(self.run.inflight)} in flight", "dim"))
        if self.failed:
            head.append(f"   {self.failed} failed", "bold red")
        parts: list[RenderableType] = [head, Text(), self._table()]
        if any(self.requests):  # replies name their replicas
            parts += [Text(), self.replicas("replica", "in flight")]
        return Group(*parts, Text(), self.bar(width - 24, self.clock(now)))

    def count(self) -> None:
        """Add the records since the last frame to the sums."""
        for record in self.run.done[self.counted :]:
            name = record.replica or ""
            self.requests[name] = self.requests.get(name, 0) + 1
            self.recent.append(record)
            if record.error is not None:
                self.failed += 1
                continue
            self.outputs += record.outputs
            if record.ttft is not None:
                self.ttft.append(record.ttft * 1000)
            if record.prompt_tokens is not None and record.cached_tokens is not None:
                self.prompt[name] = self.prompt.get(name, 0) + record.prompt_tokens
                self.cached[name] = self.cached.get(name, 0) + record.cached_tokens
        self.counted = len(self.run.done)

    def clock(self, now: float) -> str:
        return f"{len(self.run.done)}/{self.run.total}  {max(0.0, now - self.run.began) if self.run.began else 0:.0f} s"

    def bar(self, width: int, text: str | Text) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(
                total=max(1, self.run.total), completed=len(self.run.done), width=max(10, width), complete_style="cyan"
            ),
            text,
        )
        return grid

    def replicas(self, title: str, busy_title: str) -> Table:
        """Return a row per replica: requests, hit rate, and a dot per request in flight where that is known."""
        busy: dict[str, int] = {}
        # other processes report only how many
        for record in self.run.inflight.values() if isinstance(self.run.inflight, dict) else ():
            if record.replica:
                busy[record.replica] = busy.get(record.replica, 0) + 1
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for heading, justify in (
            (title, "left"),
            ("requests", "right"),
            ("from its cache", "left"),
            ("", "right"),
            (busy_title, "left"),
        ):
            table.add_column(
                heading, justify=justify, no_wrap=True, min_width=_MOST_DOTS if heading == busy_title else 0
            )
        names = sorted(set(self.requests) | set(busy), key=lambda name: (len(name), name))
        for name in names[:_MOST_ROWS]:
            rate = self.cached.get(name, 0) / self.prompt[name] if self.prompt.get(name) else 0.0
            bar = ProgressBar(total=1, completed=rate, width=24, complete_style="green", finished_style="green")
            table.add_row(
                name or "server",
                str(self.requests.get(name, 0)),
                bar,
                percent(rate, 0),
                Text("●" * min(busy.get(name, 0), _MOST_DOTS), "cyan"),
            )
        if len(names) > _MOST_ROWS:
            table.add_row(Text(f"and {len(names) - _MOST_ROWS} more", "dim"))
        return table

    def _sample(self, now: float) -> None:
        while self.recent and self.recent[0].last < now - _WINDOW_SECONDS:
            self.recent.popleft()
        good, elapsed = [record for record in self.recent if record.error is None], max(now - self.run.began, 1e-9)
        window, ttft = min(elapsed, _WINDOW_SECONDS), [record.ttft * 1000 for record in good if record.ttft is not None]
        told = [record for record in good if record.prompt_tokens and record.cached_tokens is not None]
        hit = (
            sum(record.cached_tokens for record in told) / sum(record.prompt_tokens for record in told)
            if told
            else None
        )
        hits = sum(self.cached.values()) / sum(self.prompt.values()) if any(self.prompt.values()) else None
        (p50, p99), (all_p50, all_p99) = _percentiles(ttft), _percentiles(self.ttft)
        self.figures = [
            self._figure(
                "requests/s", len(good) / window, (self.counted - self.failed) / elapsed, lambda value: f"{value:,.1f}"
            ),
            self._figure(
                "output tokens/s", sum(record.outputs for record in good) / window, self.outputs / elapsed, show.count
            ),
            self._figure("TTFT p50", p50, all_p50, show.milliseconds),
            self._figure("TTFT p99", p99, all_p99, show.milliseconds),
            self._figure("cache hit rate", hit, hits, show.percent),
        ]

    def _figure(self, name: str, now: float | None, so_far: float | None, form) -> tuple[str, str, str, str]:
        past = self.past.setdefault(name, [])
        past.append(now or 0.0)
        return name, "–" if now is None else form(now), "–" if so_far is None else form(so_far), spark(past)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for title, justify in (
            ("", "left"),
            (f"last {_WINDOW_SECONDS:.0f} s", "right"),
            ("so far", "right"),
            ("", "left"),
        ):
            table.add_column(title, justify=justify, no_wrap=True, min_width=9)
        for name, now, so_far, past in self.figures:
            table.add_row(Text(name, "dim"), Text(now, "bold"), so_far, Text(past, "dim cyan"))
        return table


def _percentiles(values: Sequence[float]) -> Iterable[float | None]:
    return np.percentile(values, (50, 99)) if values else (None, None)


def spark(values: Sequence[float]) -> str:
    """Return a sparkline: a character per value, or per mean of neighbouring values, scaled to the maximum."""
    if not values:
        return ""
    heights = [float(part.mean()) for part in np.array_split(values, min(len(values), _SPARK_WIDTH))]
    most = max(heights)
    return "".join(
        _SPARKS[min(int(height / most * len(_SPARKS)), len(_SPARKS) - 1)] if most > 0 else _SPARKS[0]
        for height in heights
    )
