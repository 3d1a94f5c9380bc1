"""`ntf-analytics`: reports over the event journal, snapshots of the store, journal maintenance."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, date, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from analytics.errors import AnalyticsError
from store.journal_schema import KEY_FILE_NAME, JournalKeyError, load_key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from analytics.session import SparkOptions

EXIT_PROBLEMS = 3
REPORT_NAMES = ("health", "delivery", "tokens", "stale", "incidents", "capacity")


def moment(text: str) -> datetime:
    """An ISO day or time, UTC unless it says otherwise."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date like 2026-01-31 or 2026-01-31T12:00") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def to_us(at: datetime) -> int:
    """A time in microseconds."""
    return (at - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def local_folder(text: str) -> Path:
    """A folder of this machine."""
    if "://" in text:
        raise argparse.ArgumentTypeError("this command works on local folders only")
    return Path(text)


def setting(text: str) -> tuple[str, str]:
    """A setting's name and value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name, value


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    main = argparse.ArgumentParser(prog="ntf-analytics", description=__doc__)
    main.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('ntf-server')}")
    commands = main.add_subparsers(dest="command", required=True)
    add_report(commands.add_parser("report", help="run one report, or all"))
    add_stream(commands.add_parser("stream", help="keep the health tables current while the journal grows"))
    add_sql(commands.add_parser("sql", help="run a query over rollups, derived tables and report tables"))
    add_generate(commands.add_parser("generate", help="make a journal with planted incidents"))
    about = "write the store's tokens, subscriptions, servers to Parquet"
    add_snapshot(commands.add_parser("snapshot", help=about))
    compact = commands.add_parser("compact", help="join the segments of past days")
    compact.add_argument("--journal", type=local_folder, required=True)
    compact.add_argument("--before", type=moment, help="compact days before this one; default: today")
    retain = commands.add_parser("retain", help="delete old days of the journal")
    retain.add_argument("--journal", type=local_folder, required=True)
    retain.add_argument("--days", type=positive, required=True, help="days to keep, today not counted")
    return main


def add_report(report: argparse.ArgumentParser) -> None:
    """Options of `report`."""
    option = report.add_argument
    option("name", choices=[*REPORT_NAMES, "all"])
    add_window(report)
    option("--out", required=True, help="folder or Hadoop URL for the results")
    option("--config", type=Path, help="INI file with a section [ANALYTICS]: limits, thresholds")
    option("--check", action="store_true", help=f"exit with {EXIT_PROBLEMS} if there are problems")
    option("--quiet", action="store_true", help="say nothing but what is wrong, for cron")
    option("--for-others", action="store_true", help="tables only, without pseudonyms and small numbers")
    option("--full", action="store_true", help="make all rollups anew")
    add_spark(report)
    for limit in ("dead-token-days", "never-active-days", "inactive-days", "unreachable-days"):
        option(f"--{limit}", type=positive, help="see the documentation")


def add_window(command: argparse.ArgumentParser) -> None:
    """Which journal, and which time of it."""
    option = command.add_argument
    option("--journal", required=True, help="folder or Hadoop URL of the journal")
    option("--snapshots", help="folder or Hadoop URL of snapshots, for what is older than the journal")
    option("--from", dest="start", type=moment, help="start, inclusive; default: the first event")
    option("--to", dest="end", type=moment, help="end, exclusive; default: after the last event")
    about = "the last DAYS days, up to the last full hour, instead of --from and --to"
    option("--days", type=positive, help=about)


def add_sql(sql: argparse.ArgumentParser) -> None:
    """Options of `sql`."""
    option = sql.add_argument
    option("query", nargs="?", help="a SELECT; default: list the tables and their columns")
    add_window(sql)
    option("--out", help="also write the whole result to this new folder or Hadoop URL, as Parquet files")
    option("--format", choices=("table", "csv", "json"), default="table", help="default: %(default)s")
    option("--limit", type=positive, default=1000, help="rows to print; default: %(default)s")
    add_spark(sql)


def add_spark(command: argparse.ArgumentParser) -> None:
    """Options of commands that run on Spark."""
    option = command.add_argument
    option("--rollups", help="folder or Hadoop URL of daily rollups; default: in the journal")
    option("--master", help="Spark master; default: that of spark-submit, else this machine")
    option("--memory", default="1g", help="memory of the Spark driver; default: %(default)s")
    option("--ui", action="store_true", help="serve Spark's web interface while the command runs")
    about = "any setting of Spark's"
    option("--conf", action="append", default=[], type=setting, metavar="KEY=VALUE", help=about)


def add_stream(stream: argparse.ArgumentParser) -> None:
    """Options of `stream`."""
    option = stream.add_argument
    option("--journal", required=True, help="folder or Hadoop URL of the journal")
    option("--out", required=True, help="folder or Hadoop URL for the tables and the checkpoint")
    option("--every", type=positive, default=60, help="seconds between two looks; default: %(default)s")
    option("--once", action="store_true", help="end when there is nothing new, for cron")
    add_spark(stream)


def add_generate(generate: argparse.ArgumentParser) -> None:
    """Options of `generate`."""
    option = generate.add_argument
    option("--out", type=local_folder, required=True, help="folder for the journal")
    option("--events", type=positive, default=1_000_000, help="about how many; default: %(default)s")
    option("--seed", type=int, default=1)
    option("--days", type=positive, default=28)
    option("--servers", type=positive, default=12)


def add_snapshot(snapshot: argparse.ArgumentParser) -> None:
    """Options of `snapshot`."""
    source = snapshot.add_mutually_exclusive_group(required=True)
    source.add_argument("--database", type=Path, help="the daemon's SQLite file")
    source.add_argument("--url", help="the address of the daemons' PostgreSQL database")
    source.add_argument("--url-file", type=Path, help="a file that holds it: other users see command lines")
    about = f"the journal's key; default: {KEY_FILE_NAME} beside the SQLite file"
    snapshot.add_argument("--key", type=Path, help=about)
    snapshot.add_argument("--out", type=local_folder, required=True, help="folder of snapshots")


@contextmanager
def shown_progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done and for how long; plain lines where there is no terminal."""
    if not console.is_terminal:
        yield lambda text: console.print(text, soft_wrap=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting")
        yield lambda text: progress.update(task, description=text)


@contextmanager
def needed(who: str, extra: str) -> Iterator[None]:
    """Around imports: other commands must not need what is imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise AnalyticsError(f"{who} {error.name}: pip install 'ntf-server[{extra}]'") from error


def spark_options(args: argparse.Namespace) -> "SparkOptions":
    """How Spark is to run; what is on this machine is small or large, anything else is taken for large."""
    from analytics.files import bytes_of
    from analytics.session import SparkOptions

    return SparkOptions(
        master=args.master,
        memory=args.memory,
        settings=dict(args.conf),
        input_bytes=bytes_of(args.journal, args.rollups),
        ui=args.ui,
    )


@contextmanager
def started(args: argparse.Namespace, console: Console) -> "Iterator[SparkSession]":
    """Spark, as the command line wants it."""
    from analytics.session import spark_session

    with spark_session(spark_options(args)) as session:
        if args.ui:
            console.print(f"Spark's web interface: {session.sparkContext.uiWebUrl}", soft_wrap=True)
        yield session


def run_stream(args: argparse.Namespace, console: Console) -> None:
    """`stream`."""
    with needed("reports need", "analytics"):
        from analytics.streaming import StreamJob, keep_current
    must_be_elsewhere(args)
    job = StreamJob(
        journal=args.journal,
        out=args.out,
        rollups=args.rollups,
        every=args.every,
        once=args.once,
        now=lambda: to_us(datetime.now(UTC)),
        options=lambda: spark_options(args),
    )
    with shown_progress(console) as tell, started(args, console) as session:
        keep_current(session, job, tell)


def asked_time(args: argparse.Namespace, now: datetime) -> tuple[int | None, int | None]:
    """Start and end as they were given, None where they were not."""
    start, end = args.start, args.end
    if args.days is not None:
        if start is not None or end is not None:
            raise AnalyticsError("--days says it all: give either that or --from and --to")
        end = now.replace(minute=0, second=0, microsecond=0)
        start = end - timedelta(days=args.days)
    if start is not None and end is not None and start >= end:
        raise AnalyticsError("--from must be before --to")
    return None if start is None else to_us(start), None if end is None else to_us(end)


def must_be_elsewhere(args: argparse.Namespace) -> None:
    """Results in a journal would be read as segments of it."""
    from analytics.files import is_within

    if is_within(args.out, args.journal):
        raise AnalyticsError("--out must not be within the journal")


def run_report(args: argparse.Namespace, console: Console) -> int:
    """`report`; with `--check` its exit code says whether there are problems."""
    with needed("reports need", "analytics"):
        from analytics.job import ReportJob, run_reports
    must_be_elsewhere(args)
    from analytics.inputs import Limits
    from analytics.settings import load_settings

    given = {f.name: getattr(args, f.name, None) for f in fields(Limits)}
    limits, thresholds = load_settings(args.config, given)
    now = datetime.now(UTC)
    start, end = asked_time(args, now)
    job = ReportJob(
        names=list(REPORT_NAMES) if args.name == "all" else [args.name],
        journal=args.journal,
        out=args.out,
        now=to_us(now),
        start=start,
        end=end,
        snapshots=args.snapshots,
        rollups=args.rollups,
        full=args.full,
        limits=limits,
        thresholds=thresholds,
        for_others=args.for_others,
    )
    shown = Console(quiet=True) if args.quiet else console
    with shown_progress(shown) as tell:
        tell("starting Spark")
        with started(args, shown) as session:
            page = run_reports(session, job, tell)
    for name, rows in page.tables.items():
        shown.print(f"{name}: {rows.count_of_all:,} rows")
    shown.print(f"{page.checked.rows:,} events in {len(page.checked.good)} segments")
    for note in page.notes:
        shown.print(note, soft_wrap=True)
    for finding in page.findings:
        console.print(f"! {finding.text}", soft_wrap=True)
    for segment in page.checked.bad:
        shown.print(f"skipped {segment.path}: {segment.error}", soft_wrap=True)
    if not args.quiet:
        print(job.result)
    return EXIT_PROBLEMS if args.check and page.findings else 0


def run_sql(args: argparse.Namespace, console: Console) -> None:
    """`sql`."""
    with needed("queries need", "analytics"):
        from analytics.question import Question, ask_question, list_tables, show
    now = datetime.now(UTC)
    start, end = asked_time(args, now)
    question = Question(
        query=args.query or "",
        journal=args.journal,
        now=to_us(now),
        start=start,
        end=end,
        snapshots=args.snapshots,
        rollups=args.rollups,
        out=args.out,
        most=args.limit,
    )
    with shown_progress(console) as tell:
        tell("starting Spark")
        with started(args, console) as session:
            answer = ask_question if question.query else list_tables
            rows = answer(session, question, tell)
    print(show(rows, args.format), end="")
    if not rows.is_whole:
        console.print(f"the first {len(rows):,} of {rows.count_of_all:,} rows; see --limit and --out")


def run_generate(args: argparse.Namespace, console: Console) -> None:
    """`generate`."""
    from analytics.generator import ANSWERS_NAME, Plan, write_journal

    plan = Plan(seed=args.seed, events=args.events, days=args.days, servers=args.servers)
    with shown_progress(console) as tell:
        tell(f"generating about {args.events:,} events")
        answers = write_journal(plan, args.out)
    console.print(f"{answers.events:,} events in {answers.segments} segments")
    print(args.out / ANSWERS_NAME)


def run_snapshot(args: argparse.Namespace, console: Console) -> None:
    """`snapshot`."""
    from analytics.snapshot import sqlite_store, write_snapshot

    if args.key is None and args.database is None:
        raise AnalyticsError(f"--key is needed: {KEY_FILE_NAME} in the data folder of a daemon")
    key = load_key(args.key or args.database.with_name(KEY_FILE_NAME))
    if args.database is not None:
        store = sqlite_store(args.database)
    else:
        with needed("this needs", "postgres"):
            from analytics.snapshot_postgres import postgres_store
        store = postgres_store(args.url or args.url_file.read_text("utf-8").strip())
    with store as ask:
        result = write_snapshot(ask, key, datetime.now(UTC), args.out)
    for name, rows in result.rows.items():
        console.print(f"{name}: {rows:,} rows")
    for file in result.files:
        print(file)


def existing(folder: Path) -> Path:
    """The folder, which must be there."""
    if not folder.is_dir():
        raise AnalyticsError(f"no such folder: {folder}")
    return folder


def run_compact(args: argparse.Namespace, console: Console) -> None:
    """`compact`."""
    from analytics.maintenance import compact

    before = args.before.date() if args.before else today()
    done = compact(existing(args.journal), min(before, today()))
    console.print(f"{done.files_before} files are now {done.files_after}; {done.events:,} events")
    console.print(f"{done.copies:,} copies of events left out")
    for segment in done.bad:
        console.print(f"left alone {segment.path}: {segment.error}", soft_wrap=True)


def run_retain(args: argparse.Namespace, console: Console) -> None:
    """`retain`."""
    from analytics.maintenance import not_rolled_up, retain

    oldest = today() - timedelta(days=args.days)
    if unknown := not_rolled_up(existing(args.journal), oldest):
        console.print(
            f"{len(unknown)} of the days deleted, from {unknown[0]} to {unknown[-1]}, were never rolled up:"
            " reports will not know tokens and subscriptions of then. Run a report first, or take snapshots."
        )
    console.print(f"{len(retain(args.journal, oldest))} days deleted")


def today() -> date:
    """The current UTC day."""
    return datetime.now(UTC).date()


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int | None]] = {
    "report": run_report,
    "stream": run_stream,
    "sql": run_sql,
    "generate": run_generate,
    "snapshot": run_snapshot,
    "compact": run_compact,
    "retain": run_retain,
}


def expected_errors() -> tuple[type[Exception], ...]:
    """What is told in one line, without a traceback."""
    if "pyspark" not in sys.modules:
        return AnalyticsError, JournalKeyError, OSError
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return AnalyticsError, JournalKeyError, OSError, PySparkException, Py4JError


def first_lines(error: Exception) -> str:
    """The part of a message before a JVM's stack trace."""
    lines = [
        line for line in str(error).splitlines() if line.strip() and not line.startswith(("\tat ", "    at "))
    ]
    return "\n".join(lines[:3]) or type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it succeeded, 1 if not, 2 for wrong arguments."""
    args = parser().parse_args(argv)
    console = Console(stderr=True, highlight=False, markup=False)
    try:
        return COMMANDS[args.command](args, console) or 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not isinstance(error, expected_errors()):
            raise
        print(f"ntf-analytics: {first_lines(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
