"""Pages of the site that no file in docs/ holds (mkdocs hooks): README, CHANGELOG, results, and the API reference.

A module is public, and gets a page, where it has `__all__`. Its names are read from the source: nothing is imported.
"""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
AT_THE_TOP = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
LINKED = ("results/*.json",)


def public_modules() -> dict[str, list[str]]:
    """Public names of every module with `__all__`, those that are modules themselves left out, by the module's path."""
    package = griffe.load("qat", search_paths=[ROOT], allow_inspection=False)
    modules = [package]
    for module in modules:
        modules.extend(child for child in module.modules.values() if not child.is_alias)
    public = [module for module in modules if module.exports is not None]
    return {module.path: [str(name) for name in module.exports if not module[str(name)].is_module] for module in public}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the files that they link to, and the reference to the navigation."""
    for page, source in AT_THE_TOP.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in sorted(path for pattern in LINKED for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_text()))
    reference = []
    for module, names in sorted(public_modules().items()):
        page = f"reference/{module}.md"
        members = "".join(f"\n        - {name}" for name in names)
        files.append(File.generated(config, page, content=f"::: {module}\n    options:\n      members:{members}\n"))
        reference.append({module: page})
    config.nav = [*(config.nav or ()), {"Reference": reference}, {"Changes": "changelog.md"}]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the repository needs them become links between the site's pages."""
    if page.file.src_uri in AT_THE_TOP:
        return re.sub(r"\]\(docs/", "](", markdown)
    return re.sub(r"\]\(\.\./results/", "](results/", markdown).replace("](../README.md", "](index.md")
