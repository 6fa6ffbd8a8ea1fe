"""The demo's view of a run while it goes on: engines, a few conversations, the figures so far.

On a terminal it is redrawn in place; elsewhere a plain line comes every few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.drive import Run
from loadgen.progress import watch_lines
from loadgen.records import Record
from loadgen.report import spread

_FRAME_SECONDS = 0.2
_CONVERSATIONS = 4
_WIDTH = 92


@contextmanager
def starting(console: Console, policy: str, engines: int) -> Iterator[Callable[[int], None]]:
    """A status line while engines start; yields what to call with the number that are ready."""
    text = f"{policy}: starting {engines} engines and the gateway"
    if not console.is_terminal:
        console.print(f"{text} …")
        yield lambda ready: None
        return
    with console.status(text) as status:
        yield lambda ready: status.update(f"{text} · {ready} ready")


async def watched(run: Run, console: Console, policy: str, which: str) -> list[Record]:
    """Run to the end while showing what goes on."""
    viewer = asyncio.create_task(_live(run, console, policy, which) if console.is_terminal
                                 else watch_lines(run, console, policy))
    try:
        return await run.go()
    finally:
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)


async def _live(run: Run, console: Console, policy: str, which: str) -> None:
    view = View(run, policy, which)
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while True:
            screen.update(view.frame(min(console.width, _WIDTH)), refresh=True)
            await asyncio.sleep(_FRAME_SECONDS)


class View:
    """Draws a run. Keeps per-replica sums, so that a frame costs what is new and not what is done."""

    def __init__(self, run: Run, policy: str, which: str):
        self.run, self.policy, self.which = run, policy, which
        self.counted = 0
        self.requests: dict[str, int] = {}
        self.prompt: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.shown: list[Record] = []

    def frame(self, width: int) -> RenderableType:
        self._count()
        head = Text.assemble((self.policy, "bold"), (f"  {self.which}", "dim"))
        return Group(head, Text(), self._engines(), Text(), *self._talk(width), Text(), self._foot(width))

    def _count(self) -> None:
        for record in self.run.done[self.counted:]:
            name = record.replica or "server"
            self.requests[name] = self.requests.get(name, 0) + 1
            if record.prompt_tokens is not None and record.cached_tokens is not None:
                self.prompt[name] = self.prompt.get(name, 0) + record.prompt_tokens
                self.cached[name] = self.cached.get(name, 0) + record.cached_tokens
        self.counted = len(self.run.done)

    def _engines(self) -> Table:
        busy: dict[str, int] = {}
        for record in self.run.inflight.values():
            if record.replica:
                busy[record.replica] = busy.get(record.replica, 0) + 1
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for title, justify in (("engine", "left"), ("requests", "right"), ("from its cache", "left"), ("", "right"),
                               ("streaming now", "left")):
            table.add_column(title, justify=justify, no_wrap=True, min_width=16 if title == "streaming now" else 0)
        for name in sorted(set(self.requests) | set(busy)):
            rate = self.cached.get(name, 0) / self.prompt[name] if self.prompt.get(name) else 0.0
            bar = ProgressBar(total=1, completed=rate, width=24, complete_style="green", finished_style="green")
            table.add_row(name, str(self.requests.get(name, 0)), bar, f"{rate * 100:.0f} %",
                          Text("●" * min(busy.get(name, 0), 16), "cyan"))
        return table

    def _talk(self, width: int) -> Iterator[Text]:
        """A few conversations, each kept until it is answered so that it can be read."""
        now = list(self.run.inflight.values())
        alive = {id(record) for record in now}
        self.shown = [record for record in self.shown if id(record) in alive]
        known = {id(record) for record in self.shown}
        self.shown += [record for record in now if id(record) not in known][:_CONVERSATIONS - len(self.shown)]
        for row in range(_CONVERSATIONS):
            if row < len(self.shown):
                yield one_line("? ", self.shown[row].question, "cyan", width)
                yield one_line("  ", self.shown[row].text, "dim", width, end=True)
            else:  # so that nothing jumps
                yield from (Text(), Text())

    def _foot(self, width: int) -> RenderableType:
        run = self.run
        prompt, cached = sum(self.prompt.values()), sum(self.cached.values())
        ttft = spread(record.ttft for record in run.done if record.error is None)
        text = Text(f" {len(run.done)}/{run.total}  {max(0.0, perf_counter() - run.began):.0f} s")
        if prompt and ttft:
            text.append(f"   hit rate {cached / prompt * 100:.0f} %   TTFT p50 {ttft['p50']:,.0f} ms", "bold")
        grid = Table.grid()
        grid.add_row(ProgressBar(total=run.total, completed=len(run.done), width=max(10, width - 60)), text)
        return grid


def one_line(mark: str, text: str, style: str, width: int, end: bool = False) -> Text:
    """`text` on one line, its beginning or its end where it is too long."""
    room = width - cell_len(mark)
    plain = "".join(letter if letter.isprintable() else " " for letter in (text[-width:] if end else text[:width + 1]))
    if cell_len(plain) > room:
        kept = _first_cells(reversed(plain) if end else plain, room - 1)
        plain = "…" + kept[::-1] if end else kept + "…"
    return Text(mark + plain, style, no_wrap=True, overflow="ellipsis")


def _first_cells(letters: Iterable[str], room: int) -> str:
    """As many letters as fit into `room` terminal cells; some take two."""
    kept = []
    for letter in letters:
        room -= cell_len(letter)
        if room < 0:
            break
        kept.append(letter)
    return "".join(kept)


def result(policy: str, report: Mapping[str, object]) -> Text:
    """What stays on the screen of a round that is over."""
    rate, ttft = report["cache"]["hit_rate"], report["ttft_ms"] or {}
    text = Text.assemble(("✓ ", "green"), (f"{policy:<12}", "bold"))
    text.append(f" {report['completed']} answered in {report['duration_s']:.0f} s")
    if rate is not None:
        text.append(f" · hit rate {rate * 100:.0f} %")
    if ttft:
        text.append(f" · TTFT p50 {ttft['p50']:,.0f} ms, p99 {ttft['p99']:,.0f} ms")
    return text
