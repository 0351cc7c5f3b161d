"""A hook of mkdocs: adds the pages that stand outside docs/ to the site, and leads links to where they are there.

On disk a page links to others by their place in the repository, so that links work in an editor and where the
repository is browsed: docs/tiers.md says `../benchmarks/README.md`. The site has docs/ as its root.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "cluster.yaml",
    "demos/hybrids/*/README.md",
    "launch/clusters/*.yaml",
    "notes/*.md",
)
_LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/ under their path in the repository."""
    for pattern in _OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between paths of the repository into links between paths of the site."""
    here = page.file.src_uri
    on_disk = f"docs/{here}" if (ROOT / "docs" / here).is_file() else here

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(on_disk), link[0]))
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(here) or ".")

    return _LINK.sub(moved, markdown)
