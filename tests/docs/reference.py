"""`python -m tests.docs.reference`: writes the pages that are generated from the code."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric

from agent.__main__ import _parser as agent_parser
from analytics.__main__ import parser as analytics_parser
from bench import page
from ntf_server.__main__ import _parser as server_parser
from ntf_server.config import ENV_PREFIX, SECTIONS
from ntf_server.metrics import PREFIX
from smp_router.__main__ import make_parser as router_parser
from tests.docs import mistakes
from tests.test_architecture import ROOT

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "ntf-server": server_parser,
    "ntf-agent": agent_parser,
    "ntf-analytics": analytics_parser,
    "smp-router": router_parser,
}

NOT_ARGUMENTS = (argparse._SubParsersAction, argparse._HelpAction, argparse._VersionAction)
KEYS_HEAD = ("| key | is | default | allowed |", "|---|---|---|---|")


def configuration() -> str:
    parts = [
        "# Configuration\n",
        "Every key of `ntf-server.ini`. Each can also be set in the environment as"
        f" `{ENV_PREFIX}<SECTION>_<KEY>`; the environment wins.",
    ]
    for name, section in SECTIONS.items():
        parts += [
            f"\n## {name}\n",
            f"{section.__doc__}\n",
            *KEYS_HEAD,
        ]
        parts += [_key_row(field) for field in dataclasses.fields(section)]
    return "\n".join(parts) + "\n"


def _key_row(field: dataclasses.Field[Any]) -> str:
    kind = field.metadata["kind"]
    default = kind.show(field.default)
    shown = f"`{default}`" if default else ""
    return f"| `{field.name}` | {_cell(field.metadata['doc'])} | {shown} | {_cell(kind.allowed)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands() -> str:
    parts = [
        "# Commands\n",
        "All programs have `--help` and `--version`; options of a program may stand behind its commands too.",
    ]
    for name, make in PARSERS.items():
        parser = make()
        parts += [f"\n## {name}\n", parser.description or ""]
        rows = _rows(parser)
        parts += [*_table(rows), *_commands(name, parser, "###", frozenset(rows))]
    return "\n".join(parts) + "\n"


def _commands(name: str, parser: argparse.ArgumentParser, mark: str, told: frozenset[str]) -> Iterator[str]:
    """Those of a program, and those of a command that has its own; without the rows that were `told`."""
    for command, about, sub in _subcommands(parser):
        yield f"\n{mark} {name} {command}\n"
        yield f"{about[:1].upper()}{about[1:]}."
        yield from _table([row for row in _rows(sub) if row not in told])
        yield from _commands(f"{name} {command}", sub, f"{mark}#", told)


def _table(rows: list[str]) -> list[str]:
    return ["", "| argument | |", "|---|---|", *rows] if rows else []


def _rows(parser: argparse.ArgumentParser) -> list[str]:
    """Help texts as argparse fills them in, with `~` for whose home it is."""
    rows = []
    for action in parser._actions:
        if not isinstance(action, NOT_ARGUMENTS):
            text = parser._get_formatter()._expand_help(action) if action.help else ""
            shown = text.replace(os.path.expanduser("~") + "/.", "~/.")
            rows.append(f"| `{_words(action)}` | {_cell(shown)} |")
    return rows


def _words(action: argparse.Action) -> str:
    words = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    value = str(words or "|".join(map(str, action.choices or ()))) if action.nargs != 0 else ""
    if action.option_strings:
        return f"{action.option_strings[-1]} {value}".strip()
    return value or action.dest


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                if module := getattr(sub, "_module", ""):
                    importlib.import_module(module).add_arguments(sub)
                yield name, about.get(name, ""), sub


def metrics() -> str:
    parts = [
        "# Metrics\n",
        f"At `/metrics` of `[METRICS] port`. All names begin with `{PREFIX}`; beside them are those of the"
        " Python process (`process_…`, `python_…`).\n",
        "| metric | kind | tells |",
        "|---|---|---|",
    ]
    parts += [_metric_row(family) for family in sorted(families(), key=lambda family: family.name)]
    return "\n".join(parts) + "\n"


def families() -> list[Metric]:
    """Of all modules of the daemon; which of them a run has depends on its configuration."""
    for package in ("ntf_server", "smp_client", "store"):
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    return [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]


def _metric_row(family: Metric) -> str:
    collector = REGISTRY._names_to_collectors[family.name]
    labels = ",".join(getattr(collector, "_labelnames", ()))
    shown = family.name + (f"{{{labels}}}" if labels else "")
    return f"| `{shown}` | {family.type} | {_cell(family.documentation)} |"


GENERATED: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "metrics.md": metrics,
    "performance.md": page.written,
    "mistakes.md": mistakes.page,
}


def main() -> None:
    for name, make in GENERATED.items():
        (ROOT / "docs" / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
