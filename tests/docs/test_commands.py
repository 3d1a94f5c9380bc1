"""Every command that the documentation shows: understood by its program, and run where it can be."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.__main__ import parser as bench_parser
from tests.docs.pages import Block, all_blocks, blocks, commands
from tests.docs.reference import PARSERS
from tests.ntf_server.test_cli import ANY_PORT
from tests.test_architecture import ROOT

TIMEOUT = 120
BIN = Path(sys.executable).parent
IDENTITY = "LcJUMfVhwD8yxjAiSaDzzGF3-kLG4Uh0Fl_ZIjrRwjI="
NTF, SMP = f"ntf://{IDENTITY}@h:1", f"smp://{IDENTITY}@h:1"
PLACEHOLDERS = {"ntf://…": NTF, "NTF_ADDRESS": NTF, "smp://…": SMP, "SMP_ADDRESS": SMP}
ALL = [(block, command) for block in all_blocks() for command in commands(block)]


def words(command: str) -> list[str]:
    for placeholder, value in PLACEHOLDERS.items():
        command = command.replace(placeholder, value)
    return shlex.split(command)


@pytest.mark.parametrize(("block", "command"), ALL, ids=[f"{b.where}: {c}" for b, c in ALL])
def test_programs_understand_it(block: Block, command: str) -> None:
    program, *arguments = words(command)
    if program in PARSERS:
        parse(PARSERS[program](), arguments, command)
    elif Path(program).name == "python":
        module = arguments[1].partition("=")[0]
        assert importlib.util.find_spec(module) is not None, command
        if module == "bench":
            parse(bench_parser(), arguments[2:], command)
    else:
        assert (ROOT / program).exists() or (BIN / program).exists(), command


def parse(parser: argparse.ArgumentParser, arguments: list[str], command: str) -> None:
    try:
        parser.parse_args(arguments)
    except SystemExit as stopped:
        if stopped.code != 0:
            raise AssertionError(command) from None


PRINTED = {
    "NTF_ADDRESS": r"ntf://\S+",
    "SMP_ADDRESS": r"smp://[^\s/]+(?=\s)",
    "LINK": r"simplex:/\S+",
}
"Placeholders of the documentation, and how what they stand for looks when a program prints it."


class Terminal:
    """Runs lines one after the other in a home of their own; what serves stays until the end."""

    def __init__(self, home: Path, **replaced: str) -> None:
        self._home = home
        self._replaced = replaced
        self._serving: list[subprocess.Popen[str]] = []
        self.env = os.environ | ANY_PORT | {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def do(self, line: str) -> str:
        """As in a shell: variables, work in the background, and what was printed before in place of names."""
        line = line.replace("~", str(self._home))
        if line.startswith("export "):
            for word in shlex.split(line)[1:]:
                name, _, value = word.partition("=")
                self.env[name] = self._filled(value)
            return ""
        out = self.start(line.removesuffix("&")) if line.endswith("&") else self.run(line)
        for name, pattern in PRINTED.items():
            if found := re.search(pattern, out):
                self._replaced[name] = found[0]
        return out

    def run(self, line: str) -> str:
        done = subprocess.run(
            self._words(line),
            cwd=self._home,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def start(self, line: str) -> str:
        """The first line that it prints."""
        process = subprocess.Popen(
            self._words(line), cwd=self._home, env=self.env, stdout=subprocess.PIPE, text=True
        )
        self._serving.append(process)
        assert process.stdout is not None
        return process.stdout.readline()

    def close(self) -> None:
        for process in self._serving:
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
            process.communicate()
        self._serving.clear()

    def _words(self, line: str) -> list[str]:
        line = line.removeprefix(".venv/bin/").replace("~", str(self._home))
        return [self._filled(word) for word in shlex.split(line)]

    def _filled(self, text: str) -> str:
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text


@contextlib.contextmanager
def terminal(home: Path, replaced: dict[str, str] | None = None) -> Iterator[Terminal]:
    shell = Terminal(home, **(replaced or {}))
    try:
        yield shell
    finally:
        shell.close()


def shown(page: str, first: str) -> list[str]:
    """The commands of the block that has one starting like this."""
    for block in blocks(ROOT / page):
        if any(command.startswith(first) for command in commands(block)):
            return commands(block)
    raise AssertionError(f"{page} has no block with {first}")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/operations.md"])
def test_first_server(tmp_path: Path, page: str) -> None:
    _, init, start = shown(page, "ntf-server init")
    with terminal(tmp_path) as shell:
        assert "Server address: ntf://" in shell.run(init)
        assert "Server address: ntf://" in shell.start(start)


def test_backup(tmp_path: Path) -> None:
    with terminal(tmp_path, {"/var/backups": str(tmp_path)}) as shell:
        shell.run("ntf-server init --fqdn ntf.example.org")
        shell.start("ntf-server start")
        for line in shown("docs/store.md", "ntf-server backup"):
            assert "checked" in shell.run(line)
        shell.close()
        (restore,) = shown("docs/store.md", "ntf-server restore")
        assert "Restored: " in shell.run(restore)


def test_router(tmp_path: Path, unused_tcp_port: int) -> None:
    init, start = shown("docs/router.md", "smp-router init")
    with terminal(tmp_path, {"5223": str(unused_tcp_port)}) as shell:
        address = shell.run(init).splitlines()[0]
        assert shell.start(start).strip() == address


def test_tutorial(tmp_path: Path, unused_tcp_port_factory: Callable[[], int]) -> None:
    """From the first line to the last, in order, with other ports and the addresses that it prints."""
    ports = {old: str(unused_tcp_port_factory()) for old in ("5443", "5223", "5224")}
    page = ROOT / "docs" / "tutorial.md"
    lines = [line for block in blocks(page) for line in block.text.splitlines()]
    with terminal(tmp_path, ports) as shell:
        del shell.env["NTF_TRANSPORT_PORT"]
        shown = [shell.do(line) for line in lines]
    assert "Token: ACTIVE" in "".join(shown)
    assert '"notificationData"' in "".join(shown).replace("\\", "")
    assert shown[-1] == "Connection 1: Lunch at 12?\n"


def test_fake_push(tmp_path: Path, unused_tcp_port: int) -> None:
    (start,) = shown("docs/push.md", "ntf-server fake-push")
    with terminal(tmp_path, {"/tmp/": f"{tmp_path}/", "5443": str(unused_tcp_port)}) as shell:
        assert '"ca_file"' in shell.start(start)
        (curl,) = [block.text for block in blocks(ROOT / "docs" / "push.md") if block.text.startswith("curl")]
        if shutil.which("curl"):
            assert '"violations": []' in shell.run(curl.replace("\\\n", ""))


def test_journal_maintenance(tmp_path: Path) -> None:
    lines = shown("docs/analytics.md", "ntf-analytics compact")
    (tmp_path / "ntf").mkdir()
    replaced = {
        "/var/lib/ntf": f"{tmp_path}/ntf",
        "/tmp/journal": f"{tmp_path}/ntf/journal",
        "1000000": "1000",
    }
    with terminal(tmp_path, replaced) as shell:
        shell.run(next(line for line in lines if line.startswith("ntf-analytics generate")))
        for command in ("compact", "retain"):
            shell.run(next(line for line in lines if line.startswith(f"ntf-analytics {command}")))
