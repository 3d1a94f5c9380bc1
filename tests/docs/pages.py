"""What is written for people, cut into what a test can check: links, code words, blocks, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.test_architecture import ALLOWED, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PRODUCT = tuple(ALLOWED)
PROGRAMS = ("ntf-server", "ntf-agent", "ntf-analytics", "smp-router")
OTHERS = ("apt-get", "curl", "docker", "pipx", "runuser", "systemctl", "tail")
"Programs of others that the documentation tells to use."
ASSIGNMENTS = re.compile(r"^(?:[A-Z_]+=\S+ )+")


@dataclass(frozen=True)
class Block:
    """A fenced or indented block."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def tokens(page: Path) -> tuple[Token, ...]:
    return tuple(MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")))


def inline(page: Path, kind: str) -> Iterator[Token]:
    for token in tokens(page):
        yield from (child for child in token.children or () if child.type == kind)


def code_words(page: Path) -> list[str]:
    return [token.content for token in inline(page, "code_inline")]


def links(page: Path) -> list[str]:
    return [str(token.attrs["href"]) for token in inline(page, "link_open")]


def anchors(page: Path) -> set[str]:
    """As forges and the documentation site make them from headings."""
    found = tokens(page)
    texts = [after.content for token, after in pairwise(found) if token.type == "heading_open"]
    return {re.sub(r"[^\w -]", "", text.lower()).strip().replace(" ", "-") for text in texts}


def blocks(page: Path) -> list[Block]:
    return [
        Block(page, (token.map or [0])[0] + 1, token.info.strip(), token.content)
        for token in tokens(page)
        if token.type in ("fence", "code_block")
    ]


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[str]:
    """The lines of a block that call a program or a script, continued lines joined."""
    if block.language == "text":  # what a program prints
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line.removeprefix(".venv/bin/") for line in map(strip, lines) if is_command(line)]


def strip(line: str) -> str:
    bare = re.sub(r"\s+#.*", "", line).strip().removeprefix("$ ").removesuffix(" &")
    return ASSIGNMENTS.sub("", bare)


def is_command(line: str) -> bool:
    first = line.partition(" ")[0]
    known = first in (*PROGRAMS, *OTHERS) or line.startswith("python -m ")
    return known or first.startswith((".venv/bin/", "scripts/"))


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Rows of cells as they are written; the first row is the head."""
    rows: list[list[str]] = []
    for token, after in pairwise(tokens(page)):
        if token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append(after.content)
        elif token.type == "table_close":
            yield rows


@cache
def product_text() -> str:
    """All that our code says, to look words up in."""
    files = [
        path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sql")
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@cache
def file_names() -> frozenset[str]:
    folders: Sequence[str] = (*PRODUCT, "tests", "bench", "docs", "scripts", "requirements", "contrib")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return frozenset(path.name for path in [*files, *ROOT.iterdir()])
