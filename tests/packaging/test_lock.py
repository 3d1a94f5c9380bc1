"""What is installed is what was chosen: ranges, versions and hashes agree, and names do not collide."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.test_architecture import ALLOWED

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
AGAIN = "run scripts/lock"


def locked(name: str) -> dict[str, Version]:
    """Versions by name; every one of them has hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found = re.findall(r"^([\w.-]+)==(\S+)[^\n]*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert len(found) == len(re.findall(r"^\w", text, re.MULTILINE))
    return {canonicalize_name(name): Version(version) for name, version in found}


def requirements(*extras: str) -> list[Requirement]:
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize(
    ("name", "extras"), [("base", ()), ("dev", tuple(PROJECT["optional-dependencies"]))], ids=["base", "dev"]
)
def test_the_lock_has_every_dependency(name: str, extras: tuple[str, ...]) -> None:
    versions = locked(name)
    for requirement in requirements(*extras):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements/{name}.txt: {AGAIN}"
        assert version in requirement.specifier, f"requirements/{name}.txt has {version}: {AGAIN}"


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("base", ()),
        ("statements", ("statements",)),
        ("analytics", ("analytics",)),
        ("dev", tuple(PROJECT["optional-dependencies"])),
    ],
)
def test_the_lock_is_complete(name: str, extras: tuple[str, ...]) -> None:
    """It is installed without a look at what else its packages ask for: an old pip would take the newest of
    those that are asked for with an extra, and then miss its hash."""
    versions = locked(name)
    waiting, seen = requirements(*extras), set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        project = canonicalize_name(requirement.name)
        assert project in versions, f"{requirement} is not in requirements/{name}.txt: {AGAIN}"
        for extra in ("", *requirement.extras):
            if (project, extra) not in seen:
                seen.add((project, extra))
                waiting += needs(project, extra)


def needs(project: str, extra: str) -> list[Requirement]:
    """What an installed package asks for on this machine."""
    try:
        found = [Requirement(text) for text in requires(project) or ()]
    except PackageNotFoundError:
        pytest.fail(f"{project} is not installed: run scripts/setup dev")
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})]


def test_the_lock_has_the_chosen_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    chosen = {canonicalize_name(name): Version(version) for name, version in map(split, lines)}
    assert chosen == locked("dev"), AGAIN
    assert locked("base").items() <= locked("dev").items(), AGAIN


def split(line: str) -> tuple[str, str]:
    requirement = Requirement(line)
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return requirement.name, specifier.version


def test_no_dependency_ships_a_package_of_our_name() -> None:
    """Our top-level names are common words: whoever else used one would overwrite us, or we them."""
    owners = packages_distributions()
    for package in (*ALLOWED, "tests", "bench"):
        assert set(owners.get(package, ())) <= {PROJECT["name"]}, package
