"""Hooks of `make docs`: add pages from outside docs/ and notebooks to the site; correct links."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
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
    """Add the files from outside docs/, and a page for each notebook."""
    for name, there in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, there, content=text))
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        name = path.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join(part for cell in cells for part in cell_markdown(cell))
        files.append(File.generated(config, name, content=text))
    return files


def cell_markdown(cell: dict[str, Any]) -> Iterator[str]:
    """Yield a cell of a notebook and its outputs as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("data", {"text/plain": output.get("text", "")})
        if html := "".join(shown.get("text/html", "")):
            # Without empty lines, at which Markdown would end the block.
            yield "\n".join(line for line in html.splitlines() if line.strip())
        elif text := "".join(shown["text/plain"]):
            yield f"```text\n{text}\n```"


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
        place = OUTSIDE.get(target, target.removeprefix("docs/")).replace(".ipynb", ".md")
        return f"{found[1]}{posixpath.relpath(place, folder_in_site)}{found[3]}"

    return LINK.sub(led, markdown)
