"""Figures of results, drawn beside the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (10.0, 5.5)  # inches
LINEAR_BELOW = 5.0  # of the y axis where the x axis has names; beyond it is logarithmic
MARKERS = "osD^v<>Ph*Xdp8H"  # no two series look the same, also without colours


@dataclass(frozen=True)
class Point:
    """One measurement."""

    label: str
    x: float | str  # a number, or a name on the axis
    y: float
    spread: float = 0.0  # standard deviation of y


@dataclass(frozen=True)
class Plot:
    """Points by number, on a logarithmic axis, or by name. All points with one label are a series."""

    x: str
    y: str
    points: tuple[Point, ...]
    levels: Mapping[str, float] = field(default_factory=dict[str, float])  # horizontal lines by name


def draw(plot: Plot, file: Path) -> None:
    """Write an SVG: the same points always give the same file."""
    import matplotlib as mpl  # not needed where results are only read
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "neuroshard", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
        axes.grid(visible=True, alpha=0.3)
        if isinstance(plot.points[0].x, str):
            _draw_named(axes, plot)
        else:
            _draw_numbered(axes, plot)
        for name, level in plot.levels.items():
            axes.axhline(level, linestyle="--", color="0.3", label=f"{name}: {level:g}")
        figure.legend(loc="outside right upper")
        figure.savefig(file, format="svg", metadata={"Date": None})


def _draw_numbered(axes: Axes, plot: Plot) -> None:
    axes.set_xscale("log")
    for series in _series(plot):
        places = [point.x for point in series if not isinstance(point.x, str)]
        _draw_series(axes, plot, places, series)


def _draw_named(axes: Axes, plot: Plot) -> None:
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW)
    names = list(dict.fromkeys(str(point.x) for point in plot.points))
    every = _series(plot)
    for number, series in enumerate(every):
        aside = 0.6 * ((number + 0.5) / len(every) - 0.5)  # so that series do not hide each other
        _draw_series(axes, plot, [names.index(str(point.x)) + aside for point in series], series)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")


def _series(plot: Plot) -> list[list[Point]]:
    labels = dict.fromkeys(point.label for point in plot.points)
    return [[point for point in plot.points if point.label == label] for label in labels]


def _draw_series(axes: Axes, plot: Plot, places: Sequence[float], series: Sequence[Point]) -> None:
    marker = MARKERS[_series(plot).index(list(series)) % len(MARKERS)]
    values, spreads = [point.y for point in series], [point.spread for point in series]
    axes.errorbar(places, values, spreads, fmt=marker, capsize=3, label=series[0].label)
