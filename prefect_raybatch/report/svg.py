"""A little SVG: text, lines, bars, axes with round ticks. Pure; no style sheet and no script, so
that the same text works as a file, inside HTML and as an image in Markdown."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, told apart with any colour vision.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, GREY, PALE, INK = "#56B4E9", "#6B7280", "#E5E7EB", "#1F2937"
FONT = "system-ui, sans-serif"
LETTER = 0.58  # mean width of a character, in font sizes
Scale = Callable[[float], float]


def num(value: float) -> str:
    """A coordinate, short."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(
    x: float, y: float, words: str, anchor: str = "start", size: int = 12, fill: str = INK
) -> str:
    return (
        f'<text x="{num(x)}" y="{num(y)}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(clean(words))}</text>'
    )


def clean(words: str) -> str:
    """Text without the characters that XML cannot hold: names of hosts and runs are anybody's."""
    return "".join(c if _allowed(ord(c)) else "\N{REPLACEMENT CHARACTER}" for c in words)


def _allowed(code: int) -> bool:
    return code >= 0x20 and not 0xD800 <= code <= 0xDFFF and code not in (0xFFFE, 0xFFFF)


def shorten(words: str, length: int) -> str:
    """The words, cut in their middle: both ends of a host's name tell it from others."""
    if len(words) <= length:
        return words
    head = (length - 1) // 2
    return f"{words[:head]}…{words[len(words) - (length - 1 - head) :]}"


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}" '
        f'fill="{fill}"{" " + more if more else ""}/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = PALE, more: str = "") -> str:
    return (
        f'<path d="M{num(x1)} {num(y1)}L{num(x2)} {num(y2)}" stroke="{stroke}" fill="none"'
        f"{' ' + more if more else ''}/>"
    )


def curve(points: Iterable[tuple[float, float]], stroke: str, more: str = "") -> str:
    """A line through the points."""
    path = "L".join(f"{num(x)} {num(y)}" for x, y in points)
    return (
        f'<path d="M{path}" stroke="{stroke}" stroke-width="2" fill="none" '
        f'stroke-linejoin="round"{" " + more if more else ""}/>'
    )


def document(title: str, width: int, height: float, body: Sequence[str]) -> str:
    """The whole picture on a white ground: the page around it may be dark."""
    name = escape(clean(title))
    ground = rect(0, 0, width, height, "#FFFFFF", 'rx="6"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {num(height)}" '
        f'width="{width}" height="{num(height)}" role="img" aria-label="{name}" '
        f'font-family="{FONT}"><title>{name}</title>'
        f"{ground}{''.join(body)}</svg>"
    )


def stacked(pictures: Sequence[str], gap: float = 14) -> str:
    """Pictures of `document`, one below the other, as one."""
    body, y, width = [], 0.0, 0
    for picture in pictures:
        size = re.match(r'<svg [^>]*?width="(\d+)" height="([\d.]+)"', picture)
        if size is None:
            raise ValueError(f"{picture[:60]!r} is no picture of document()")
        body.append(picture.replace("<svg ", f'<svg y="{num(y)}" ', 1))
        width = max(width, int(size[1]))
        y += float(size[2]) + gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {num(y - gap)}" '
        f'width="{width}" height="{num(y - gap)}">{"".join(body)}</svg>'
    )


def data_uri(picture: str) -> str:
    """The picture as an image's address."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> str:
    """Coloured squares with their names, in a row."""
    made = []
    for colour, words in entries:
        made.append(rect(x, y - 9, 10, 10, colour) + text(x + 15, y, words, size=11, fill=GREY))
        x += 15 + LETTER * 11 * len(words) + 18
    return "".join(made)


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """About `number` round values from `low` (at or under the first) to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / number
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * m for m in (1, 2, 2.5, 5, 10) if base * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """1.2k, 3.4M: a figure for an axis."""
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{mark}"
    return f"{value:.3g}"


def span(seconds: float) -> tuple[float, str]:
    """(seconds in the unit, its name) that suits a time of this length."""
    if seconds >= 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds >= 180 else (1.0, "s")


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Values to coordinates."""
    width = high - low or 1.0
    return lambda value: start + (value - low) / width * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """The same, each decade as long as the next; what is under `low` stands at the start."""
    inner = linear(math.log10(low), math.log10(high), start, end)
    return lambda value: inner(math.log10(max(value, low)))


@dataclass(frozen=True)
class Box:
    """A plot's own area in the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def y_axis(self, high: float, title: str) -> tuple[Scale, str]:
        """Scale from 0 to `high`, and the grid with its figures."""
        y = linear(0, high, self.bottom, self.top)
        made = [text(self.left - 8, self.top - 10, title, "start", 11, GREY)]
        for value in ticks(0, high, 4):
            made.append(line(self.left, y(value), self.right, y(value)))
            made.append(text(self.left - 8, y(value) + 4, short(value), "end", 11, GREY))
        return y, "".join(made)

    def x_axis(self, values: Sequence[tuple[float, str]], x: Scale, title: str) -> str:
        """Figures below the area, and what they are."""
        made = [line(self.left, self.bottom, self.right, self.bottom, GREY)]
        for value, words in values:
            made.append(line(x(value), self.bottom, x(value), self.bottom + 4, GREY))
            made.append(text(x(value), self.bottom + 17, words, "middle", 11, GREY))
        middle = (self.left + self.right) / 2
        made.append(text(middle, self.bottom + 33, title, "middle", 11, GREY))
        return "".join(made)
