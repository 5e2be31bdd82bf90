"""Paths and links in README and docs lead to files that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "hetpeer"
ROOMS = "peer|bootstrap|averaging|stages|dht|examples"
PAGES = sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(rf"`((?:hetpeer/)?(?:{ROOMS})/[a-z0-9_/{{}},.]*)(?:::?[^`]*)?`")
BESIDE = re.compile(r"`((?:tests|benchmarks|docs)/(?!results)[A-Za-z0-9_/{},.*]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CITED = re.compile(r'\b([a-z]+)\.md, "([^"\\]+)"')
"""A page and its section, as docstrings name them."""


def spelled_out(name: str) -> Iterator[str]:
    """`a/{b,c}` is `a/b` and `a/c`."""
    match = re.search(r"\{([^}]*)\}", name)
    if match is None:
        yield name
        return
    for part in match[1].split(","):
        yield from spelled_out(name[: match.start()] + part.strip() + name[match.end() :])


def is_there(folder: Path, name: str) -> bool:
    """A folder, a file, a pattern of files, or a module without its ending."""
    if "*" in name:
        return any(folder.glob(name))
    path = folder / name.rstrip("/")
    return path.exists() or path.with_name(path.name + ".py").exists()


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    inside = [name for found in PATH.findall(text) for name in spelled_out(found.removeprefix("hetpeer/"))]
    beside = [name for found in BESIDE.findall(text) for name in spelled_out(found)]
    missing = [name for name in inside if not is_there(PRODUCT, name)]
    missing += [name for name in beside if not is_there(ROOT, name)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    broken = []
    for link in LINK.findall(FENCE.sub("", (ROOT / page).read_text())):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = here / file if file else ROOT / page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_architecture_page_has_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [path.parent for path in PRODUCT.glob("*/*/__init__.py")]
    assert rooms
    assert [str(room.relative_to(PRODUCT)) for room in rooms if f"`{room.name}/`" not in text] == []


def sections(page: Path) -> set[str]:
    """Headings of a page, and what stands in bold or italics at the beginning of a paragraph or list item."""
    text = page.read_text()
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    found += re.findall(r"^ *(?:[*-] |\d+\. )?\*{1,2}([^*\n]+)\*", text, re.MULTILINE)
    return {one.strip(" .?:") for one in found}


def test_sections_that_the_code_names_exist() -> None:
    missing = []
    for folder in ("hetpeer", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__):
                continue
            for page, section in CITED.findall(re.sub(r"\s+", " ", path.read_text())):
                target = ROOT / "docs" / f"{page}.md"
                if not target.exists() or section.strip(" .?:") not in sections(target):
                    missing.append(f"{path.relative_to(ROOT)}: {page}.md, {section}")
    assert missing == []
