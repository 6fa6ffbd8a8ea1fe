"""The live view of the demo: engines, a few conversations, and the figures so far.

On a terminal it is redrawn in place; elsewhere a plain line is printed every few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group, RenderableType
from rich.text import Text

from loadgen.drive.records import Record
from loadgen.drive.run import Run
from loadgen.report import progress
from loadgen.report.shares import percent

_FRAME_SECONDS = 0.2
_CONVERSATIONS = 4


@contextmanager
def starting(console: Console, policy: str, engines: int) -> Iterator[Callable[[int], None]]:
    """Show a status line while engines start; yield a function to call with the number of ready engines."""
    text = f"{policy}: starting {engines} engines and the gateway"
    if not console.is_terminal:
        console.print(f"{text} …")
        yield lambda ready: None
        return
    with console.status(text) as status:
        yield lambda ready: status.update(f"{text} · {ready} ready")


async def watched(run: Run, console: Console, policy: str, which: str) -> list[Record]:
    """Run the load to its end while showing its progress; return its records."""
    return await progress.watched(run, console, policy, View(run, policy, which), _FRAME_SECONDS)


class View(progress.View):
    """The live view of one round of the demo."""

    def __init__(self, run: Run, policy: str, which: str):
        super().__init__(run, policy)
        self.which = which
        self.shown: list[Record] = []

    def frame(self, width: int, now: float | None = None) -> RenderableType:
        now = perf_counter() if now is None else now
        figures = self.figures(now)
        foot = Text(self.clock(now))
        if self.counted:
            foot.append(f"   hit rate {figures['cache hit rate']}   TTFT p50 {figures['TTFT p50']}", "bold")
        head = Text.assemble((self.label, "bold"), (f"  {self.which}", "dim"))
        engines = self.replicas("engine", "streaming now")
        return Group(head, Text(), engines, Text(), *self._talk(width), Text(), self.bar(width - 60, foot))

    def _talk(self, width: int) -> Iterator[Text]:
        """Yield the lines of a few conversations, each shown until it is answered so that it can be read."""
        now = list(self.run.inflight.values())
        alive = {id(record) for record in now}
        self.shown = [record for record in self.shown if id(record) in alive]
        known = {id(record) for record in self.shown}
        self.shown += [record for record in now if id(record) not in known][: _CONVERSATIONS - len(self.shown)]
        for row in range(_CONVERSATIONS):
            if row < len(self.shown):
                yield one_line("? ", self.shown[row].question, "cyan", width)
                yield one_line("  ", self.shown[row].text, "dim", width, end=True)
            else:  # blank lines keep the layout steady
                yield from (Text(), Text())


def one_line(mark: str, text: str, style: str, width: int, end: bool = False) -> Text:
    """Return `text` on one line, cut to its beginning or its end where it is too long."""
    plain = "".join(
        letter if letter.isprintable() else " " for letter in (text[-width:][::-1] if end else text[:width])
    )
    kept = (chop_cells(plain, width - cell_len(mark)) or [""])[0]
    return Text(mark + (kept[::-1] if end else kept), style, no_wrap=True)


def result(policy: str, report: Mapping[str, object]) -> Text:
    """Return the summary line of a finished round."""
    rate, ttft = report["cache"]["hit_rate"], report["ttft_ms"] or {}
    text = Text.assemble(("✓ ", "green"), (f"{policy:<12}", "bold"))
    text.append(f" {report['completed']} answered in {report['duration_s']:.0f} s")
    if rate is not None:
        text.append(f" · hit rate {percent(rate, 0)}")
    if ttft:
        text.append(f" · TTFT p50 {ttft['p50']:,.0f} ms, p99 {ttft['p99']:,.0f} ms")
    return text
