"""Build hook: make the README's relative links absolute, as a package index shows it alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\]\()(?![a-z]+:|#)(?P<path>[^)\s]+)")


def with_absolute_links(text: str, repository: str) -> str:
    """Return Markdown with its relative links pointing to files of the repository on GitHub."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}{link['text']}{repository}/{kind}/main/{link['path']}"

    return LINK.sub(absolute, text)


class ReadmeHook(MetadataHookInterface):
    """Set the package's description to the README with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the field `readme`, which pyproject.toml declares as dynamic."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, metadata["urls"]["Repository"]),
        }
