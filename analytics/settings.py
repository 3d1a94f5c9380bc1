"""Limits and thresholds of reports, from a configuration file and from the command line."""

import configparser
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from analytics.errors import AnalyticsError
from analytics.findings import Thresholds
from analytics.inputs import Limits

SECTION = "ANALYTICS"


def load_settings(path: Path | None, given: Mapping[str, int | None]) -> tuple[Limits, Thresholds]:
    """What the section says, overridden by what was `given`; anything unknown or wrong is an error."""
    values: dict[str, float | int] = {} if path is None else read_section(path)
    values |= {name: value for name, value in given.items() if value is not None}
    limits = {f.name for f in fields(Limits)}
    return (
        Limits(**{name: value for name, value in values.items() if name in limits}),  # type: ignore[arg-type]
        Thresholds(**{name: value for name, value in values.items() if name not in limits}),  # type: ignore[arg-type]
    )


def read_section(path: Path) -> dict[str, float | int]:
    """The numbers of the section; other sections are somebody else's."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text("utf-8"), str(path))
    except configparser.Error as error:
        raise AnalyticsError(f"{path}: {str(error).splitlines()[0]}") from None
    kinds = {f.name: f.type for kind in (Limits, Thresholds) for f in fields(kind)}
    found: dict[str, float | int] = {}
    for name, text in parser[SECTION].items() if parser.has_section(SECTION) else ():
        if name not in kinds:
            raise AnalyticsError(f"{path}: [{SECTION}] has no {name}")
        found[name] = positive(path, name, text, whole=kinds[name] in (int, "int"))
    return found


def positive(path: Path, name: str, text: str, *, whole: bool) -> float | int:
    """A number above zero."""
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not 0 < value < 1e12:
        raise AnalyticsError(f"{path}: {name} = {text} is no {'whole ' if whole else ''}number above zero")
    return value
