"""Every file, link, key, default, variable, option, metric and class that the documentation names is real."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ntf_server.config import ENV_PREFIX, SECTIONS, parse_config
from ntf_server.metrics import OLD_GAUGES, PREFIX
from tests.docs.pages import (
    PAGES,
    PRODUCT,
    all_blocks,
    anchors,
    code_words,
    file_names,
    links,
    name,
    product_text,
    tables,
)
from tests.docs.reference import PARSERS, families
from tests.test_architecture import ROOT

SOURCE = re.compile(r"[\w./-]+\.(py|sql|md|toml|txt|ini|sh|yml)")
MADE = re.compile(r"[\w-]+\.(crt|key|pem|db|parquet|csv|html|json)")
KEY = re.compile(r"\[([A-Z_]+)\](?: ([\w]+))?(?: = (.+))?")
KEY_WITH_DEFAULT = re.compile(r"`\[([A-Z_]+)\] (\w+)` \(([\d.,]+)(?: ([a-zA-Z]+))?\)")
UNITS = {"": 1, "s": 1, "seconds": 1, "minutes": 60, "hour": 3600, "hours": 3600, "days": 1, "bytes": 1}
CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+|[A-Z]\w*[a-z]\w*)+")
VARIABLE = re.compile(rf"{ENV_PREFIX}[A-Z0-9_]+")
each_page = pytest.mark.parametrize("page", PAGES, ids=name)


@each_page
def test_links(page: Path) -> None:
    for link in links(page):
        if "://" not in link and not link.startswith("mailto:"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@each_page
def test_files(page: Path) -> None:
    for word in code_words(page):
        is_path = (ROOT / word.partition("/")[0]).is_dir() and re.fullmatch(r"[\w./-]+", word)
        if is_path or SOURCE.fullmatch(word) or MADE.fullmatch(word):
            assert exists(page, word) or is_made(word) or word.startswith("NNNN"), word


def exists(page: Path, word: str) -> bool:
    return (ROOT / word).exists() or (page.parent / word).exists() or word in file_names()


def is_made(word: str) -> bool:
    """A file that a program writes: its name, or what comes before the dot, stands in the code."""
    return any(f'"{part}"' in product_text() for part in (word, Path(word).stem))


@each_page
def test_keys(page: Path) -> None:
    for word in code_words(page):
        if found := KEY.fullmatch(word):
            section, key, value = found.groups()
            assert section in SECTIONS, word
            if key is not None:
                assert key in keys(section), word
            if value is not None:
                parse_config(f"[{section}]\n{key} = {value}\n", name(page), {})


@each_page
def test_defaults(page: Path) -> None:
    """A default is written right after its key: `[SECTION] key` (value unit)."""
    for section, key, value, unit in KEY_WITH_DEFAULT.findall(page.read_text()):
        declared = keys(section)[key].default
        assert float(value.replace(",", "")) * UNITS[unit] == declared, f"[{section}] {key}"


def keys(section: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(SECTIONS[section])}


@each_page
def test_environment_variables(page: Path) -> None:
    known = {f"{ENV_PREFIX}{section}_{key}".upper() for section in SECTIONS for key in keys(section)}
    for word in code_words(page):
        for variable in VARIABLE.findall(word):
            assert variable in known or variable.endswith("_") or f'"{variable}"' in product_text(), variable


def test_configuration_examples() -> None:
    for block in all_blocks():
        if block.language == "ini" and block.text.startswith("[") and block.text[1:2].isupper():
            parse_config(block.text, block.where, {})


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                if (module := getattr(command, "_module", "")) != "":
                    importlib.import_module(module).add_arguments(command)
                yield from options(command)


def test_options() -> None:
    known = {option for make in PARSERS.values() for option in options(make())}
    files = [*(ROOT / "scripts").iterdir(), *(ROOT / "bench").glob("*.py")]
    scripts = "\n".join(path.read_text() for path in files)
    for page in PAGES:
        for word in code_words(page):
            if found := re.match(r"--[a-z][a-z-]+", word):
                assert found[0] in known or found[0] in scripts, f"{name(page)}: {word}"


def test_metrics() -> None:
    known = {family.name for family in families()} | set(OLD_GAUGES.values())
    for page in PAGES:
        for word in code_words(page):
            if found := re.match(rf"{PREFIX}\w+", word):
                assert found[0].removesuffix("_total") in known, f"{name(page)}: {word}"
        for head, *rows in tables(page):
            if head[0] == "metric":
                for word in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", " ".join(row[0] for row in rows)):
                    full = word if word.startswith(PREFIX) else PREFIX + word
                    assert full.removesuffix("_total") in known, f"{name(page)}: {word}"


@each_page
def test_classes(page: Path) -> None:
    for word in code_words(page):
        if CLASS.fullmatch(word):
            assert re.search(rf"\b{word}\b", product_text()) or word in DEFINED_ELSEWHERE, word


DEFINED_ELSEWHERE = {"TimeoutError", "OSError"}


def test_python_examples() -> None:
    for block in all_blocks():
        if block.language == "python":
            tree = ast.parse(block.text)  # syntax; names that it imports from us exist
            compile(block.text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PRODUCT:
                    module = importlib.import_module(node.module or "")
                    for alias in node.names:
                        assert hasattr(module, alias.name), f"{block.where}: {alias.name}"


def test_the_routers_keys() -> None:
    """The development router has a file of its own."""
    from smp_router.config import RouterConfig

    defaults = {field.name: field.default for field in dataclasses.fields(RouterConfig)}
    (table,) = [rows for rows in tables(ROOT / "docs" / "router.md") if rows[0][:2] == ["key", "default"]]
    for words, values, _ in table[1:]:
        for key, value in zip(re.findall(r"`(\w+)`", words), values.split(", "), strict=False):
            if re.fullmatch(r"[\d.]+", value) and key in defaults:
                assert defaults[key] == float(value), key


def test_the_packages() -> None:
    """The table of docs/architecture.md is the one that tests/test_architecture.py enforces."""
    from tests.test_architecture import ALLOWED

    (table,) = [rows for rows in tables(ROOT / "docs" / "architecture.md") if rows[0][0] == "package"]
    assert {row[0].strip("`/") for row in table[1:]} == set(ALLOWED)


def test_the_dependencies() -> None:
    """Each has a reason."""
    from tests.packaging.test_lock import PROJECT, requirements

    page = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in requirements(*PROJECT["optional-dependencies"]):
        assert re.search(rf"\b{re.escape(requirement.name)}\b", page), requirement.name
