"""Hooks of `make docs`: add pages from outside docs/ to the site, and correct links to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
# Path in the repository: path in the site.
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",  # beside index.md, MkDocs would drop it
    "deployments/README.md": "deployments.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
    "prefect_raybatch/demo/model/README.md": "model.md",
    "flows/extract_infer_load.py": "extract_infer_load.py.txt",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside docs/."""
    for name, there in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, there, content=text))
    return files


def on_config(config: Any) -> Any:
    """Add the decision pages to the navigation; mkdocs.yml does not list them."""
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    if pages:
        config.nav.append({"Decisions": [f"decisions/{page.name}" for page in pages]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page's links from paths of the repository to paths of the site."""
    places = {there: name for name, there in OUTSIDE.items()}
    here = places.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(here)
    folder_in_site = posixpath.dirname(page.file.src_uri) or "."

    def led(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        place = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"{found[1]}{posixpath.relpath(place, folder_in_site)}{found[3]}"

    return LINK.sub(led, markdown)
