"""Plots as inline SVG: lines over time and horizontal bars. No scripts, no external assets."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 12, 26
BAR_HEIGHT, BAR_LABEL = 20, 260
COLORS = ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#5f4b8b")

Value = float | None


def number_text(value: float) -> str:
    """A number short enough for an axis or a cell."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def line_chart(title: str, x: Sequence[str], series: Sequence[tuple[str, Sequence[Value]]]) -> str:
    """One line per series over the same x positions; a missing value leaves a hole."""
    top = max((v for _, values in series for v in values if v is not None), default=0.0) or 1.0
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    step = plot_width / max(1, len(x) - 1)
    body = [grid_line(TOP + plot_height * (1 - part), top * part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for index, (_, values) in enumerate(series):
        color = COLORS[index % len(COLORS)]
        for run in runs(values):
            points = " ".join(
                f"{LEFT + i * step:.1f},{TOP + plot_height * (1 - v / top):.1f}" for i, v in run
            )
            body.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    if x:
        body.append(label(LEFT, HEIGHT - 8, x[0], "start"))
        body.append(label(WIDTH - RIGHT, HEIGHT - 8, x[-1], "end"))
    legend = "".join(
        f'<span><i style="background:{COLORS[i % len(COLORS)]}"></i>{escape(name)}</span>'
        for i, (name, _) in enumerate(series)
    )
    return figure(title, HEIGHT, body, legend)


def bar_chart(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """One horizontal bar per label, in the given order."""
    top = max((value for _, value in bars), default=0.0) or 1.0
    room = WIDTH - BAR_LABEL - 90
    body = []
    for i, (name, value) in enumerate(bars):
        y = TOP + i * BAR_HEIGHT
        width = max(0.0, value / top) * room
        body.append(label(BAR_LABEL - 8, y + 14, name, "end"))
        size = f'width="{width:.1f}" height="{BAR_HEIGHT - 6}"'
        body.append(f'<rect x="{BAR_LABEL}" y="{y + 3}" {size} fill="{COLORS[0]}"/>')
        body.append(label(BAR_LABEL + width + 6, y + 14, number_text(value), "start"))
    return figure(title, TOP + len(bars) * BAR_HEIGHT + 6, body, "")


def runs(values: Sequence[Value]) -> list[list[tuple[int, float]]]:
    """Stretches of present values with their positions."""
    found: list[list[tuple[int, float]]] = [[]]
    for i, value in enumerate(values):
        if value is None:
            found.append([])
        else:
            found[-1].append((i, value))
    return [run for run in found if run]


def grid_line(y: float, value: float) -> str:
    """A horizontal line with its value."""
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
    return line + label(LEFT - 6, y + 4, number_text(value), "end")


def label(x: float, y: float, text: str, anchor: str) -> str:
    """A text in the plot."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def figure(title: str, height: int, body: Sequence[str], legend: str) -> str:
    """A plot with its caption."""
    name = escape(title, quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{"".join(body)}</svg>'
    return f"<figure><figcaption>{name}</figcaption>{svg}<p>{legend}</p></figure>"
