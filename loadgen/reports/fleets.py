"""The plots of a plan (`loadgen.plan`): what more replicas and larger caches give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from loadgen.reports.plots import Ink, Line, Plot


def plots_of(points: Sequence[Mapping[str, object]], attainment: float, drawn: Mapping[str, Line]) -> list[Plot]:
    """Share within the SLO and hit rate against replicas, a line for each size of the cache; `drawn` has as many, in their order."""
    by_tokens: dict[int, list[Mapping[str, object]]] = {}
    for point in sorted(points, key=lambda point: (point["tokens"], point["replicas"])):
        by_tokens.setdefault(point["tokens"], []).append(point)

    def against(title: str, caption: str, value: Callable[[Mapping[str, object]], float | None], limit: float | None) -> Plot:
        def draw(axes: Axes, ink: Ink) -> None:
            for (tokens, tried), line in zip(by_tokens.items(), drawn.values(), strict=True):
                axes.plot([point["replicas"] for point in tried], [np.nan if value(point) is None else value(point) for point in tried],
                          color=line.colour, marker="o", markersize=4, label=f"{tokens:,} tokens")
            if limit:
                axes.axhline(limit, color=ink.soft, linewidth=1, linestyle=(0, (4, 3)))
            axes.set_xlabel("replicas", color=ink.soft)
            axes.set_xlim(0, None)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
            axes.set_ylim(0, 1.02 if limit else None)
            axes.legend(loc="best", labelcolor=ink.text, fontsize=9.5, handlelength=1.2)
        return Plot(title, caption, draw)
    return [against("Within the SLO", f"Share of all requests, by replicas and the cache of each; dashed: the {attainment * 100:g} % asked for.",
                    lambda point: point["share"], attainment),
            against("Hit rate", "Cached tokens over prompt tokens, as engines report them.", lambda point: point["report"]["cache"]["hit_rate"], None)]
