"""What the demo shows before and after each round; during a round it shows the live view of `report.progress`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from loadgen.report.shares import percent


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


def result(policy: str, report: Mapping[str, object]) -> Text:
    """Return the summary line of a finished round: requests answered, hit rate and TTFT under this policy."""
    rate, ttft = report["cache"]["hit_rate"], report["ttft_ms"] or {}
    text = Text.assemble(("✓ ", "green"), (f"{policy:<12}", "bold"))
    text.append(f" {report['completed']} answered in {report['duration_s']:.0f} s")
    if rate is not None:
        text.append(f" · hit rate {percent(rate, 0)}")
    if ttft:
        text.append(f" · TTFT p50 {ttft['p50']:,.0f} ms, p99 {ttft['p99']:,.0f} ms")
    return text
