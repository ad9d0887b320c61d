"""Pictures of figures, made with matplotlib. The suffix of the file chooses the format."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from bench.common.rounds import Rounds, figures_of, values_of

# Text in an SVG stays text, and equal figures give equal files.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 8})

SHOWN = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "all tokens/s",
    "ttft_ms_p50": "TTFT p50, ms",
    "tpot_ms_p50": "TPOT p50, ms",
    "itl_ms_p50": "ITL p50, ms",
    "itl_ms_p99": "ITL p99, ms",
}
"""Titles of the figures in a picture of two systems."""
COLORS = ("#1f6fb2", "#c9782b")


def side_by_side(rounds: Rounds, path: Path) -> None:
    """Draw medians with whiskers from minimum to maximum: one row per workload and group, one column per figure."""
    lines = list(dict.fromkeys((workload, group) for workload, group, _ in figures_of(rounds)))
    figure = Figure(figsize=(13, 0.8 + 0.75 * len(lines)), layout="constrained")
    grid = figure.subplots(len(lines), len(SHOWN), squeeze=False)
    for (workload, group), row in zip(lines, grid):
        row[0].set_ylabel(workload if group == "all" else f"{workload}\n({group})", rotation=0, ha="right", va="center")
        for name, axes in zip(SHOWN, row):
            _bars(axes, [values_of(system_rounds, workload, group, name) for system_rounds in rounds.values()])
    for (name, title), axes in zip(SHOWN.items(), grid[0]):
        better = "more" if name.endswith("per_s") else "less"
        axes.set_title(f"{title}\n({better} is better)", fontsize=8)
    patches = [Patch(color=color, label=name) for name, color in zip(rounds, COLORS)]
    count = len(next(iter(rounds.values())))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, title=f"medians of {count} rounds")
    _save(figure, path)


def _bars(axes: Axes, systems: Sequence[Sequence[float]]) -> None:
    for place, (values, color) in enumerate(zip(systems, COLORS)):
        middle = statistics.median(values)
        spread = [[middle - min(values)], [max(values) - middle]]
        axes.barh(-place, middle, color=color, xerr=spread, error_kw={"elinewidth": 0.8, "capsize": 2})
        axes.annotate(f" {middle:,.1f}", (max(values), -place), va="center", fontsize=7)
    axes.set_xlim(0, 1.45 * max((max(values) for values in systems), default=0) or 1)
    axes.set(xticks=[], yticks=[])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def curves(panels: Mapping[str, Mapping[str, Mapping[int, float]]], xlabel: str, path: Path) -> None:
    """Draw panels side by side, each with labelled curves over the same x axis. Both axes are logarithmic."""
    figure = Figure(figsize=(5 * len(panels), 3.8), layout="constrained")
    for axes, (ylabel, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for index, (label, points) in enumerate(lines.items()):
            color = matplotlib.colormaps["viridis"](index / len(lines))
            axes.plot(list(points), list(points.values()), "o-", label=label, color=color, markersize=3, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        places = sorted({place for points in lines.values() for place in points})
        axes.set_xticks(places, [str(place) for place in places])
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
