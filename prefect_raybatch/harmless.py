"""Escapes untrusted text for a terminal, a page or a Markdown viewer.

Text of rows, files, nodes, stages and errors is untrusted. In a terminal a control character moves
the cursor or sets the title; in Markdown brackets make links and images; characters that set the
direction of text make a name look like another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Control characters except line ends and tabs, marks that set the direction of text, line
# separators that only some programs know, halves of surrogate pairs, and characters XML forbids.
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb"
    r"\ud800-\udfff\ufffe\uffff]"
)
# Marks that are Markdown syntax. `_` within a word, and `&` and `!` alone, are plain text.
_MARKS = re.compile(
    r"[\\`*\[\]|~]"
    r"|(?<=\])\(|!(?=\[)"
    r"|(?<![^\W_])_|_(?![^\W_])"
    r"|\A[-+](?= )|\A[-=](?=[-=])|\A#(?=#*(?: |\Z))|\A>|(?<=\A\d)[.)](?= )"
)
# Addresses that viewers turn into links, some even if a mark in them is escaped. The name of a
# hosted model, MODEL@http://..., is one of them as a whole.
_ADDRESS = re.compile(
    r"((?:(?:(?:https?|ftp)://|www\.|(?<![:/\w])//(?=\w))[^\s`<|\\]*"
    r"|[-.\w+]+@(?:(?:https?|ftp)://[^\s`<|\\]*|[-.\w]+))+)",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"\A(\d{2,9})([.)])(?= )")
_ENTITY = re.compile(r"&(?=#?\w)")
_FENCES = re.compile(r"`+")
_PLAIN_URL = re.compile(r"https?://[A-Za-z0-9.-]+(?::\d{1,5})?(?:/[A-Za-z0-9/.#-]*)?")


class PageLink(str):
    """A web address that our pages show as a link; made by `link`."""


def link(url: str) -> str:
    """Return the URL as a `PageLink` if it is http(s) without special characters, else as it is."""
    return PageLink(url) if _PLAIN_URL.fullmatch(url) else url


def visible(text: str) -> str:
    r"""Return the text with hidden characters, except line ends and tabs, as escapes (`\x1b`)."""
    return text if text.isprintable() else _HIDDEN.sub(_as_escape, text)


def clean(words: str) -> str:
    """Return the text as one line of visible characters, all of which XML allows."""
    return visible(words).replace("\n", " ").replace("\t", " ")


def markdown_text(text: object) -> str:
    """Return one line of Markdown that shows the text verbatim anywhere in a page.

    No tag, link, image or other mark in it takes effect. Addresses become code, which viewers do
    not link; a `PageLink` stays a link.
    """
    if isinstance(text, PageLink):
        return text
    line = " ".join(visible(str(text)).split())
    parts = enumerate(_ADDRESS.split(line))  # every second part is an address
    return "".join(f"`{part}`" if at % 2 else _escaped(part) for at, part in parts)


def code_span(text: str) -> str:
    """Return the text as a Markdown code span.

    A text that is empty or contains ` or < is returned as escaped text instead, because it could
    end the span.
    """
    line = " ".join(visible(text).split())
    return f"`{line}`" if line and not {"`", "<"} & set(line) else markdown_text(line)


def fenced(lines: Iterable[str]) -> list[str]:
    """Return the lines of a Markdown code block that shows `lines`.

    Its fences are longer than any run of backticks in the lines.
    """
    shown = [part for line in lines for part in visible(line).split("\n")]
    longest = max((len(run) for line in shown for run in _FENCES.findall(line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *shown, fence]


def _escaped(part: str) -> str:
    part = _MARKS.sub(r"\\\g<0>", _ENTITY.sub("&amp;", part))
    return _NUMBERED.sub(r"\1\\\2", part).replace("<", "&lt;")


def _as_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
