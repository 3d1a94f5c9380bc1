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
from tests.docs.pages import OTHERS, Block, all_blocks, blocks, commands, name
from tests.docs.reference import PARSERS
from tests.ntf_server.test_cli import ANY_PORT
from tests.test_architecture import ROOT

TIMEOUT = 500.0
BIN = Path(sys.executable).parent
IDENTITY = "LcJUMfVhwD8yxjAiSaDzzGF3-kLG4Uh0Fl_ZIjrRwjI="
NTF, SMP = f"ntf://{IDENTITY}@h:1", f"smp://{IDENTITY}@h:1"
PLACEHOLDERS = {"ntf://…": NTF, "NTF_ADDRESS": NTF, "smp://…": SMP, "SMP_ADDRESS": SMP}
ALL = [(block, command) for block in all_blocks() for command in commands(block)]


def words(command: str) -> list[str]:
    for placeholder, value in PLACEHOLDERS.items():
        command = command.replace(placeholder, value)
    return shlex.split(command)


HERE = "tests/docs/test_commands.py"
ANYWHERE = {
    "python -m bench": "tests/bench/test_runner.py::test_the_command",
    "python -m bench compare": "tests/bench/test_compare.py::test_the_command_fails_if_anything_got_slower",
    "scripts/demo": "tests/ntf_demo/test_demo.py::test_prints_what_the_documentation_shows",
    "scripts/report": "tests/analytics/test_report_script.py::test_one_command_from_a_journal_to_a_page",
    "scripts/setup": "scripts/test",
    "scripts/test": "scripts/test",
}
RUN_BY = {
    "CONTRIBUTING.md": {"": "scripts/test"},
    "README.md": {
        "": f"{HERE}::test_first_server",
    },
    "docs/agent.md": {"": "tests/ntf_demo/test_demo.py::test_kept_servers_can_be_played_with"},
    "docs/analytics.md": {
        "ntf-analytics report all --journal s3a:": (
            "tests/analytics/test_job.py::test_spark_submit_with_an_archive_and_a_file_system_that_only_hadoop_knows"
        ),
        "ntf-analytics report incidents": (
            "tests/analytics/test_job.py::test_the_command_on_a_standalone_cluster_gives_the_same_numbers"
        ),
        "ntf-analytics snapshot --url-file": (
            "tests/analytics/test_snapshot.py::test_the_command_takes_a_snapshot_of_postgres"
        ),
        "ntf-analytics stream": "tests/analytics/test_streaming.py::test_new_late_and_compacted_segments",
        "apt-get": "scripts/setup",
        "ntf-analytics report all --journal /var": f"{HERE}::test_report",
        "": f"{HERE}::test_journal_maintenance",
    },
    "docs/analytics-tables.md": {"": "tests/analytics/test_sql.py::test_tables_can_be_joined"},
    "docs/demo.md": {"": "tests/ntf_demo/test_demo.py::test_prints_what_the_documentation_shows"},
    "docs/index.md": {
        "": f"{HERE}::test_first_server",
    },
    "docs/install.md": {
        "apt-get": "tests/packaging/systemd_machine.py::test_the_package_under_systemd",
        "docker": "tests/packaging/container_image.py::test_the_image",
        "ntf-server --version": "tests/ntf_server/test_cli.py::test_version",
        "pipx": "tests/packaging/test_distribution.py::test_pipx_installs_a_copy_of_the_repository",
        "runuser": "tests/packaging/systemd_machine.py::test_the_package_under_systemd",
        "scripts/deb": "tests/packaging/test_debian.py::test_install_use_remove",
        "systemctl": "tests/packaging/systemd_machine.py::test_the_package_under_systemd",
    },
    "docs/operations.md": {"": f"{HERE}::test_first_server"},
    "docs/push.md": {"": f"{HERE}::test_fake_push"},
    "docs/reliability.md": {
        "python -m tests.drills.table": "tests/drills/test_table.py::test_words_choose_rows",
        "scripts/fuzz": "tests/fuzz/test_fuzz.py::test_parsers",
    },
    "docs/router.md": {"": f"{HERE}::test_router"},
    "docs/scaling.md": {
        "ntf-server start --workers": (
            "tests/ntf_server/test_workers.py::test_workers_share_a_port_and_are_started_again"
        ),
        "": "tests/drills/several_daemons.py::test_stopped_in_order",
    },
    "docs/statements.md": {
        "ntf-server statements records": (
            "tests/ntf_server/statements/test_reports.py::test_records_of_a_subscription_and_of_a_sender"
        ),
    },
    "docs/store.md": {"": f"{HERE}::test_backup"},
    "docs/switching.md": {
        "ntf-server import": "tests/ntf_server/test_import.py::test_clients_and_routers_notice_nothing",
        "ntf-server start": f"{HERE}::test_first_server",
        "ntf-server migrate --to postgres --online": (
            "tests/ntf_server/test_moving.py::test_online_loses_nothing_that_was_acknowledged"
        ),
        "ntf-server migrate": "tests/ntf_server/test_moving.py::test_there_and_back",
    },
    "docs/tutorial.md": {"": f"{HERE}::test_tutorial"},
}
"By page and beginning of the command, the longest first: the test that runs it, or the script that CI runs."


@pytest.mark.parametrize(("block", "command"), ALL, ids=[f"{b.where}: {c}" for b, c in ALL])
def test_something_runs_it(block: Block, command: str) -> None:
    runs = RUN_BY.get(name(block.page), {}) | ANYWHERE
    begins = [each for each in runs if command.startswith(each)]
    assert begins, f"nothing runs {command!r}"
    file, _, function = runs[max(begins, key=len)].partition("::")
    assert f"def {function}(" in (ROOT / file).read_text() or not function, f"{file} has no {function}"


def test_nothing_is_listed_that_is_not_shown() -> None:
    for page, runs in RUN_BY.items():
        shown = [command for block, command in ALL if name(block.page) == page]
        assert shown, page
        for begin in runs:
            assert any(command.startswith(begin) for command in shown), f"{page}: {begin}"


@pytest.mark.parametrize(("block", "command"), ALL, ids=[f"{b.where}: {c}" for b, c in ALL])
def test_programs_understand_it(block: Block, command: str) -> None:
    program, *arguments = words(command)
    if program in OTHERS:
        return
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


@contextlib.contextmanager
def journal(home: Path) -> Iterator[Callable[[str], None]]:
    """A small journal that was generated; what is given runs the documented command that begins like this."""
    lines = shown("docs/analytics.md", "ntf-analytics compact")
    replaced = {
        "/var/lib/ntf": f"{home}/ntf",
        "/tmp/journal": f"{home}/ntf/journal",
        "/tmp/report": f"{home}/report",
        "1000000": "1000",
    }
    with terminal(home, replaced) as shell:
        # Writing an archive of Spark's classes takes as long as the report; no later command would use it.
        shell.env["XDG_CACHE_HOME"] = os.devnull
        shell.do("export NTF_JOURNAL_ENABLED=on")
        shell.run("ntf-server init --ip 127.0.0.1 --data-dir /var/lib/ntf")
        shell.start("ntf-server start")
        shell.close()

        def run(begin: str) -> None:
            shell.run(next(line for line in lines if line.startswith(f"ntf-analytics {begin}")))

        run("generate")
        yield run


def test_report(tmp_path: Path) -> None:
    with journal(tmp_path) as run:
        run("report all")
    assert (tmp_path / "report" / "report.html").exists()


def test_journal_maintenance(tmp_path: Path) -> None:
    with journal(tmp_path) as run:
        for command in ("snapshot --database", "compact", "retain"):
            run(command)
    assert list((tmp_path / "ntf" / "snapshots").rglob("*.parquet"))
