"""The live view of a run: redrawn in place on a terminal, else a plain line every ten seconds."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from time import perf_counter

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.drive.records import Record
from loadgen.drive.run import Run
from loadgen.report import show
from loadgen.report.shares import percent
from loadgen.report.summary import cache_figures

# Seconds between frames, without and with conversations in the view; a frame takes about 5 ms of the generator's time.
_FRAME_SECONDS, _TALK_SECONDS = 0.5, 0.2
_LINE_SECONDS, _WINDOW_SECONDS = 10.0, 10.0
_WIDTH = 92
_MOST_ROWS = _MOST_DOTS = 16


async def watched(run: Run, console: Console, label: str, talks: int = 0) -> list[Record]:
    """Run the load to its end while showing its progress, and return its records.

    `label`: heading of the live view; `talks`: number of requests in flight whose question and answer are shown.
    """
    view = View(run, label, talks)
    viewer = asyncio.create_task(_redrawn(view, console) if console.is_terminal else watch_lines(view, console))
    try:
        return await run.go()
    finally:
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)


async def _redrawn(view: View, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while True:
            screen.update(view.frame(min(console.width, _WIDTH)), refresh=True)
            await asyncio.sleep(_TALK_SECONDS if view.talks else _FRAME_SECONDS)


async def watch_lines(view: View, console: Console) -> None:
    began = perf_counter()
    while True:
        await asyncio.sleep(_LINE_SECONDS)
        now, run = perf_counter(), view.run
        ttft = view.figures(now)["TTFT p50"]
        failed = f" · {view.failed} failed" if view.failed else ""
        said = f"{len(run.done)}/{run.total} after {now - began:.0f} s · TTFT p50 {ttft}"
        console.print(f"{view.label}: {said} · {len(run.inflight)} in flight{failed}", highlight=False)


class View:
    """The live view of a run; each record is counted once, so that a redraw takes time only for new records.

    `label`: heading; `talks`: number of requests in flight whose question and answer are shown.
    """

    def __init__(self, run: Run, label: str, talks: int = 0):
        self.run, self.label, self.talks = run, label, talks
        self.counted = self.failed = 0
        self.requests: Counter[str] = Counter()  # by replica
        self.prompt: Counter[str] = Counter()  # prompt tokens by replica
        self.cached: Counter[str] = Counter()  # cached prompt tokens by replica
        self.recent: deque[Record] = deque()  # those that ended in the last ten seconds, roughly in order
        self.shown: list[Record] = []  # in flight, of the conversations that are shown

    def frame(self, width: int, now: float | None = None) -> RenderableType:
        now = perf_counter() if now is None else now
        figures = Text("   ".join(f"{name} {figure}" for name, figure in self.figures(now).items()), "bold")
        parts: list[RenderableType] = [Text(self.label, "bold").append(f"   {len(self.run.inflight)} in flight", "dim")]
        if self.failed:
            parts.append(Text(f"{self.failed} failed", "bold red"))
        if any(self.requests):  # replies name their replicas
            parts += [Text(), self.replicas()]
        seconds = max(0.0, now - self.run.began) if self.run.began else 0.0
        bar = Table.grid(padding=(0, 1))
        done = ProgressBar(max(1, self.run.total), len(self.run.done), max(10, width - 24), complete_style="cyan")
        bar.add_row(done, Text(f"{len(self.run.done)}/{self.run.total}  {seconds:.0f} s"))
        return Group(*parts, Text(), *self._talk(width), figures, bar)

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
        return {
            "requests/s": f"{len(good) / seconds:,.1f}",
            "output tokens/s": show.count(sum(record.outputs for record in good) / seconds),
            **{f"TTFT p{at}": show.milliseconds(np.percentile(ttft, at) if ttft else None) for at in (50, 99)},
            "hit rate": show.percent(cache_figures(good)["hit_rate"]),
        }

    def replicas(self) -> Table:
        """Return a table with a row per replica: requests, hit rate, and a dot per request known to be in flight."""
        busy = Counter(record.replica for record in self.run.inflight.values() if record.replica)
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for heading, justify in (("replica", "left"), ("requests", "right"), ("from its cache", "left"), ("", "right")):
            table.add_column(heading, justify=justify, no_wrap=True)
        table.add_column("in flight", no_wrap=True, min_width=_MOST_DOTS)
        names = sorted(set(self.requests) | set(busy), key=lambda name: (len(name), name))
        for name in names[:_MOST_ROWS]:
            rate = self.cached[name] / (self.prompt[name] or 1)
            bar = ProgressBar(1, rate, 24, complete_style="green", finished_style="green")
            dots = Text("●" * min(busy[name], _MOST_DOTS), "cyan")
            table.add_row(name or "server", str(self.requests[name]), bar, percent(rate, 0), dots)
        if len(names) > _MOST_ROWS:
            table.add_row(Text(f"and {len(names) - _MOST_ROWS} more", "dim"))
        return table

    def _talk(self, width: int) -> Iterator[Text]:
        """Yield two lines for each of `talks` requests in flight: the question, and the answer so far.

        A request stays in the view until it is answered, so that it can be read.
        """
        going = self.run.inflight
        self.shown = [record for record in self.shown if id(record) in going]
        known = {id(record) for record in self.shown}
        new = [record for key, record in going.items() if key not in known]
        self.shown += new[: self.talks - len(self.shown)]
        for record in self.shown:
            yield one_line("? ", record.question, "cyan", width)
            yield one_line("  ", record.text, "dim", width, end=True)
        yield from (Text() for _ in range(2 * (self.talks - len(self.shown))))  # blank, so that the height is constant


def one_line(mark: str, text: str, style: str, width: int, end: bool = False) -> Text:
    """Return `mark` and `text` on one line of at most `width` columns.

    If the text is too long, its beginning is shown or, with `end`, its end. `style`: a Rich style.
    """
    cut = text[-width:][::-1] if end else text[:width]
    plain = "".join(letter if letter.isprintable() else " " for letter in cut)
    kept = (chop_cells(plain, width - cell_len(mark)) or [""])[0]
    return Text(mark + (kept[::-1] if end else kept), style, no_wrap=True)
