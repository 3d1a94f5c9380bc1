"""Files for the forge and for git, checked against their schemas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    "vendor.github-workflows": sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    "vendor.github-issue-forms": [
        ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")
    ],
    "vendor.github-issue-config": [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.compose-spec": [ROOT / "contrib" / "docker" / "compose.yaml"],
    "vendor.dependabot": [ROOT / ".github" / "dependabot.yml"],
}


def tool(name: str, *arguments: object, env: Mapping[str, str] | None = None) -> None:
    command = [sys.executable, "-m", name, *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("schema", SCHEMAS)
def test_forge_files(schema: str) -> None:
    if not (ROOT / ".github").exists():
        pytest.skip("a source distribution has none")
    tool("check_jsonschema", "--builtin-schema", schema, *SCHEMAS[schema])


def test_the_container_file() -> None:
    """By hadolint, with all of its rules."""
    hadolint = Path(sys.executable).with_name("hadolint")
    file = ROOT / "contrib" / "docker" / "Dockerfile"
    done = subprocess.run([hadolint, file], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hooks(tmp_path: Path) -> None:
    config = ROOT / ".pre-commit-config.yaml"
    tool("pre_commit", "validate-config", config, env={"PRE_COMMIT_HOME": str(tmp_path)})


def test_workflows_run_the_one_script() -> None:
    for workflow in SCHEMAS["vendor.github-workflows"]:
        assert "scripts/test" in workflow.read_text()


def declared_pythons() -> list[str]:
    prefix = "Programming Language :: Python :: 3."
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [f"3.{name.removeprefix(prefix)}" for name in classifiers if name.startswith(prefix)]


def test_every_declared_python_is_tested() -> None:
    for workflow in SCHEMAS["vendor.github-workflows"]:
        assert f"python: {json.dumps(declared_pythons())}\n" in workflow.read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md"])
def test_documents_promise_the_declared_pythons(page: str) -> None:
    first, *_, last = declared_pythons()
    assert f"Python {first} to {last}" in (ROOT / page).read_text()
