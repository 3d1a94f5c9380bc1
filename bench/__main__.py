"""All benchmarks as one command; figures, aims and the spread over repeats in one table."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import page, results, since
from bench.compare import print_comparison
from bench.earlier import NoHistory
from bench.part import Part
from bench.registry import PARTS
from bench.runner import run_all, say
from bench.table import print_table, summary

NAMES = {part.name: part for part in PARTS}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    made.add_argument("--quick", action="store_true", help="smaller sizes, about four minutes")
    made.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help="these parts")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    made.add_argument("--list", action="store_true", help="name the parts and their options")
    made.add_argument(
        "--set",
        nargs="+",
        default=[],
        type=setting,
        metavar="PART.OPTION=VALUE",
        help="another size; values of a list are separated by commas",
    )
    made.add_argument(
        "--since", metavar="COMMIT", help="what got slower since then: both versions in turn, part by part"
    )
    made.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="of each part with --since (default: %(default)s)"
    )
    commands = made.add_subparsers(dest="command")
    compare = commands.add_parser("compare", help="what got slower beyond the spread; fails if anything did")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.add_argument("--all", action="store_true", help="show what stayed the same, too")
    written = commands.add_parser("page", help="write the documentation's page from results")
    written.add_argument("results", type=Path, nargs="?", default=page.RESULTS)
    written.add_argument("--out", type=Path, default=page.PAGE)
    return made


def setting(text: str) -> tuple[str, str, Any]:
    """Part, option and value; a value is of the kind that the option has by itself."""
    where, _, value = text.partition("=")
    name, _, option = where.partition(".")
    if name not in NAMES or option not in (known := NAMES[name].options(quick=False)):
        raise argparse.ArgumentTypeError(f"no such option: {where} (see --list)")
    kind = known[option]
    if isinstance(kind, tuple):
        return name, option, tuple(type(kind[0])(one) for one in value.split(","))
    return name, option, type(kind)(value)


def given(settings: Sequence[tuple[str, str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, option, value in settings:
        found.setdefault(name, {})[option] = value
    return found


def print_list() -> None:
    for part in PARTS:
        options = " ".join(f"{name}={value}" for name, value in part.options(quick=False).items())
        print(f"{part.name:16} {part.title}; {part.repeats} × in {part.seconds:.0f} s; {options}")


def end(*_: object) -> None:
    """Once: `timeout` and others send it twice, and the second must not stop what the first began."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("ended")


def run(parts: Sequence[Part], args: argparse.Namespace) -> int:
    """What was measured is written down after each part, so an end in the middle loses one part."""
    for found in run_all(parts, quick=args.quick, given=given(args.set)):
        if args.json:
            results.write(found, args.json)
    print_table(found, parts)
    say(summary(found))
    return 1 if any(part.error for part in found.parts) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return obey(parser().parse_args(arguments))
    except (NoHistory, results.UnreadableResults) as error:
        sys.exit(str(error))


def obey(args: argparse.Namespace) -> int:
    if args.command == "compare":
        same = print_comparison(results.read(args.old), results.read(args.new), everything=args.all)
        return 0 if same else 1
    if args.command == "page":
        args.out.write_text(page.written(args.results), encoding="utf-8")
        return 0
    if args.list:
        print_list()
        return 0
    parts = [part for part in PARTS if not args.only or part.name in args.only]
    signal.signal(signal.SIGTERM, end)
    if args.since:
        return 0 if since.compare(args.since, parts, rounds=args.rounds, quick=args.quick) else 1
    return run(parts, args)


if __name__ == "__main__":
    sys.exit(main())
