from __future__ import annotations

from pathlib import Path

import pytest

from store.schema_doc import BEGIN, END, with_schema

PAGE = Path(__file__).parents[2] / "docs" / "store.md"


def test_the_documentation_shows_the_present_schema() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_schema(text) == text


def test_an_old_schema_is_replaced() -> None:
    page = with_schema(f"head\n{BEGIN}old{END}\ntail\n")
    assert page.startswith(f"head\n{BEGIN}\n")
    assert page.endswith(f"{END}\ntail\n")
    assert "CREATE TABLE tokens" in page
    assert "old" not in page.replace("oldest", "")


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="missing"):
        with_schema("nothing")
