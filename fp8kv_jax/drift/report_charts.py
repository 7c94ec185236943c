"""Charts of a report as inline SVG: heatmaps, columns and lines, without a library.

Colours tell nothing alone: cells carry their values, series their own marks. A chart is
as wide as a phone and is scaled up by the page, never down.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

# Width of a chart, room for labels left of and below the plot, and its height.
_WIDTH, _LEFT, _BOTTOM, _TOP, _HEIGHT = 360, 52, 46, 12, 150
_CELL_WIDTH, _CELL_HEIGHT, _ROW_LABEL = 42, 17, 38
_NUM_TICKS, _MOST_NARROW_LABELS, _WIDEST_COLUMN = 4, 12, 60
# What a log axis shows at least, and where an exact 0 is drawn.
LEAST_SHARE = 1e-8

type Cells = Sequence[Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class Colours:
    """A continuous scale of colours, and how its values are written.

    Attributes:
      stops: values, ascending, and the colour (red, green, blue) of each.
      text: writes a value.
      is_log: colours follow the logarithm; 0 and less get the first.
    """

    stops: tuple[tuple[float, tuple[int, int, int]], ...]
    text: Callable[[float], str]
    is_log: bool = True

    def of(self, value: float) -> tuple[int, ...]:
        """The colour of a value; beyond the ends that of the end."""
        places = [self._place(x) for x, _ in self.stops]
        colours = [colour for _, colour in self.stops]
        place = self._place(max(value, self.stops[0][0]))
        index = sum(place > x for x in places[1:-1])
        low, high = places[index], places[index + 1]
        part = min(1.0, max(0.0, (place - low) / (high - low)))
        pair = zip(colours[index], colours[index + 1], strict=True)
        return tuple(round(a + part * (b - a)) for a, b in pair)

    def _place(self, value: float) -> float:
        return math.log2(value) if self.is_log else value


def short(value: float, *, least: float = 1e-3) -> str:
    """Three digits; below `least` one digit and an exponent: 3.1e-05 -> 3e-5."""
    if value and abs(value) < least:
        digits, exponent = f"{value:.0e}".split("e")
        return f"{digits}e{int(exponent)}"
    return f"{value:.3g}"


def _brief(value: float) -> str:
    """Two digits at most, for a cell: 0.048, 3e-3."""
    return f"{value:.2g}" if value >= 9.95e-3 else short(value, least=1e-2)


def small_ratio(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.3g}"


# Blue below the calibrated amax, orange above: told apart with any colour vision.
RATIOS = Colours(
    stops=(
        (0.1, (33, 102, 172)),
        (0.5, (146, 197, 222)),
        (1.0, (247, 247, 247)),
        (2.0, (253, 184, 99)),
        (10.0, (179, 88, 6)),
    ),
    text=small_ratio,
)
# One hue that darkens: readable as grey, too.
SHARES = Colours(
    stops=(
        (LEAST_SHARE, (255, 247, 220)),
        (1e-4, (254, 178, 76)),
        (1.0, (102, 20, 6)),
    ),
    text=_brief,
)
ERRORS = Colours(
    stops=((1e-3, (247, 252, 253)), (3e-2, (140, 150, 198)), (1.0, (77, 0, 75))),
    text=_brief,
)


def heatmap(
    cells: Cells,
    colours: Colours,
    *,
    name: str,
    rows: Sequence[object],
    title: Callable[[int, int], str],
    columns: Sequence[object] | None = None,
    column_name: str = "head",
    narrow: bool = False,
) -> Markup:
    """Draws layers (down) against heads, or other columns (across).

    Args:
      cells: a value each; None for one that nobody knows.
      colours: what they look like.
      name: what is shown, for those who cannot see it.
      rows: labels of the layers.
      title: what a cell says when it is pointed at.
      columns: labels of the columns; 0, 1, ... by default.
      column_name: what a column is.
      narrow: leaves the values out of the cells, and cells that are 0 blank.
    """
    width = 12 if narrow else _CELL_WIDTH
    labels = list(range(len(cells[0]))) if columns is None else columns
    parts = [_column_labels(labels, width, column_name)]
    for row, (label, values) in enumerate(zip(rows, cells, strict=True)):
        y = 30 + row * _CELL_HEIGHT
        parts.append(_text(_ROW_LABEL - 5, y + 12, label, "end"))
        for column, value in enumerate(values):
            if not (narrow and not value):
                shown = None if narrow else _cell_text(value, colours)
                where = (_ROW_LABEL + column * width, y, width)
                parts.append(_cell(where, value, shown, title(row, column), colours))
    size = (_ROW_LABEL + width * len(labels) + 4, 34 + len(cells) * _CELL_HEIGHT)
    return _svg(size, name, parts, "heat")


def _column_labels(labels: Sequence[object], width: int, name: str) -> Markup:
    step = -(-len(labels) // _MOST_NARROW_LABELS) if width < 20 else 1
    parts = [_text(_ROW_LABEL - 5, 10, "layer", "end"), _text(_ROW_LABEL, 10, name)]
    for index in range(0, len(labels), step):
        x = _ROW_LABEL + index * width + width / 2
        parts.append(_text(x, 24, labels[index], "middle"))
    return Markup().join(parts)


def _cell_text(value: float | None, colours: Colours) -> str:
    if value is None:
        return "\N{EN DASH}"
    return colours.text(value) if value else "0"


def _cell(
    where: tuple[float, float, float],
    value: float | None,
    shown: str | None,
    title: str,
    colours: Colours,
) -> Markup:
    x, y, width = where
    colour = (226, 226, 226) if value is None else colours.of(value)
    # Luminance: above a fifth, black stands out more than white.
    light = (0.2126, 0.7152, 0.0722)
    luminance = sum(w * (c / 255) ** 2.2 for w, c in zip(light, colour, strict=True))
    ink = "#111" if luminance > 0.2 else "#fff"
    rect = Markup('<rect x="{}" y="{}" width="{}" height="16" fill="{}"/>')
    parts = [
        Markup("<title>{}</title>").format(title),
        rect.format(_at(x), _at(y), width - 1, f"#{bytes(colour).hex()}"),
    ]
    if shown is not None:
        parts.append(_text(x + width / 2, y + 12, shown, "middle"))
    return Markup('<g fill="{}">{}</g>').format(ink, Markup().join(parts))


def legend(colours: Colours, name: str) -> Markup:
    """Draws a scale of colours with its stops, evenly apart."""
    width, count = 46, len(colours.stops)
    parts = []
    for index, (value, _) in enumerate(colours.stops):
        text = colours.text(value)
        where = (index * width, 0, width)
        parts.append(_cell(where, value, text, text, colours))
    return _svg((count * width, 17), f"Legend: {name}", parts, "legend")


def columns(
    values: Sequence[float],
    *,
    name: str,
    labels: Sequence[object],
    axis: str,
    titles: Sequence[str],
    marked: Callable[[int], bool] = lambda index: False,
    is_log: bool = False,
) -> Markup:
    """Draws a column for each value; a marked one is outlined in another colour.

    Args:
      values: heights, from 0 up.
      name: what is shown.
      labels: of the columns; some are left out where there are many.
      axis: what the columns stand for.
      titles: what a column says when it is pointed at.
      marked: which ones stand out.
      is_log: heights follow the logarithm, from `LEAST_SHARE` on.
    """
    top = _axis_top(values, is_log=is_log)
    width = (_WIDTH - _LEFT - 6) / len(values)
    parts = [_grid(top, is_log=is_log), _x_labels(labels, width, axis)]
    for index, value in enumerate(values):
        height = _HEIGHT * _part(value, top, is_log=is_log)
        rect = Markup(
            '<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title>'
            "</rect>"
        )
        shown = max(1.0, min(width - 2, _WIDEST_COLUMN))
        x, y = _LEFT + (index + 0.5) * width - shown / 2, _TOP + _HEIGHT - height
        kind = "alarm" if marked(index) else "one"
        where = tuple(map(_at, (x, y, shown, height)))
        parts.append(rect.format(kind, *where, titles[index]))
    return _svg((_WIDTH, _TOP + _HEIGHT + _BOTTOM), name, parts, "chart")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart; None leaves a gap."""

    name: str
    values: Sequence[float | None]


def lines(
    series: Sequence[Line],
    *,
    name: str,
    labels: Sequence[object],
    axis: str,
    lowest: float = 0.0,
    text: Callable[[float], str] = short,
) -> Markup:
    """Draws up to three lines over evenly spaced places, each with marks of its own.

    Args:
      series: the lines.
      name: what is shown.
      labels: of the places.
      axis: what the places are.
      lowest: where the vertical axis begins.
      text: writes a value.
    """
    known = [x for line in series for x in line.values if x is not None]
    top = _axis_top(known, lowest=lowest)
    width = (_WIDTH - _LEFT - 6) / len(labels)
    parts = [_grid(top, lowest=lowest, text=text), _x_labels(labels, width, axis)]
    for index, line in enumerate(series):
        points = [
            (_LEFT + (i + 0.5) * width, _y(value, lowest, top), labels[i], value)
            for i, value in enumerate(line.values)
            if value is not None
        ]
        path = " ".join(f"{_at(x)},{_at(y)}" for x, y, _, _ in points)
        polyline = Markup('<polyline class="line s{}" points="{}"/>')
        parts.append(polyline.format(index, path))
        for x, y, label, value in points:
            title = f"{line.name}, {axis} {label}: {text(value)}"
            parts.append(_mark(index, x, y, title))
        if len(series) > 1:
            y = _TOP + _HEIGHT + 41
            parts += [
                _mark(index, _LEFT + 4 + index * 104, y - 4, line.name),
                _text(_LEFT + 12 + index * 104, y, line.name),
            ]
    return _svg((_WIDTH, _TOP + _HEIGHT + _BOTTOM), name, parts, "chart")


def _mark(index: int, x: float, y: float, title: str) -> Markup:
    """A circle, a square or a diamond."""
    if index == 0:
        shape = Markup('<circle class="s0" cx="{}" cy="{}" r="3.5">')
        tag, fields = "circle", (_at(x), _at(y))
    else:
        turned = Markup(' transform="rotate(45 {} {})"').format(_at(x), _at(y))
        shape = Markup('<rect class="s{}" x="{}" y="{}" width="6" height="6"{}>')
        tag = "rect"
        fields = (index, _at(x - 3), _at(y - 3), turned if index == 2 else "")
    closed = Markup("{}<title>{}</title></{}>")
    return closed.format(shape.format(*fields), title, tag)


def _axis_top(
    values: Sequence[float], *, lowest: float = 0.0, is_log: bool = False
) -> float:
    """A round number that no value exceeds: 1, 2, 4 or 5 times a power of ten."""
    if is_log:
        return 1.0
    span = max(values, default=0.0) - lowest
    if span <= 0:
        return lowest + 1.0
    power = 10.0 ** math.floor(math.log10(span))
    return lowest + next(x * power for x in (1, 2, 4, 5, 10) if x * power >= span)


def _part(value: float, top: float, *, is_log: bool) -> float:
    if not is_log:
        return max(0.0, value) / top
    least = math.log10(LEAST_SHARE)
    return 1 - math.log10(value) / least if value > LEAST_SHARE else 0.0


def _y(value: float, lowest: float, top: float) -> float:
    part = (value - lowest) / (top - lowest)
    return _TOP + _HEIGHT * (1 - min(1.0, max(0.0, part)))


def _grid(
    top: float,
    *,
    lowest: float = 0.0,
    is_log: bool = False,
    text: Callable[[float], str] = short,
) -> Markup:
    parts = []
    for tick in range(_NUM_TICKS + 1):
        share = tick / _NUM_TICKS
        value = lowest + share * (top - lowest)
        if is_log:
            value = LEAST_SHARE ** (1 - share)
        y = _at(_TOP + _HEIGHT * (1 - share))
        line = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>')
        parts.append(line.format(_LEFT, _WIDTH - 4, y, y))
        parts.append(_text(_LEFT - 5, float(y) + 4, text(value), "end"))
    return Markup().join(parts)


def _x_labels(labels: Sequence[object], width: float, axis: str) -> Markup:
    longest = max(len(str(label)) for label in labels)
    room = max(1, min(len(labels), int((_WIDTH - _LEFT) / (7 * longest + 8))))
    step = -(-len(labels) // room)
    y = _TOP + _HEIGHT + 14
    parts = [
        _text(_LEFT + (i + 0.5) * width, y, labels[i], "middle")
        for i in range(0, len(labels), step)
    ]
    parts.append(_text(_LEFT + (_WIDTH - _LEFT) / 2, y + 13, axis, "middle"))
    return Markup().join(parts)


def _text(x: float, y: float, text: object, anchor: str = "start") -> Markup:
    tag = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
    return tag.format(_at(x), _at(y), anchor, text)


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _svg(
    size: tuple[float, float], name: str, parts: Sequence[Markup], kind: str
) -> Markup:
    tag = Markup(
        '<svg class="{}" role="img" aria-label="{}" viewBox="0 0 {} {}" width="{}" '
        'height="{}">{}</svg>'
    )
    box = tuple(_at(x) for x in size)
    return tag.format(kind, name, *box, *box, Markup().join(parts))
