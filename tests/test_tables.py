"""Tables for people: nothing of them is cut, whatever the page."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from conftest import plan_for
from rich.console import Console
from rich.table import Table
from test_command import rolecall

from builder.report import print_plan
from builder.tables import print_table

EP2 = ("model=tiny_mixtral", "deployment=ep2")


def printed(width: int, *overrides: str, is_terminal: bool = False) -> str:
    out = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=is_terminal,
        color_system=None,
        highlight=False,
        markup=False,
    )
    print_plan(plan_for(*overrides), out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160, 300])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_heading_and_no_value_is_cut(width: int, is_terminal: bool) -> None:
    text = printed(width, *EP2, is_terminal=is_terminal)
    assert "…" not in text
    (headings,) = (line for line in text.splitlines() if line.startswith(" device   stage"))
    assert " ".join(headings.split()) == (
        "device stage replica rank layers heads KV heads columns experts their columns "
        "vocabulary weights KV pages exchange signals total"
    )


def test_command_prints_wide_tables_whole_where_there_is_no_terminal(tmp_path: Path) -> None:
    done = rolecall(tmp_path, *EP2, "task=plan")
    assert "vocabulary" in done.stdout
    assert "…" not in done.stdout


def test_columns_that_may_be_broken_fit_the_page() -> None:
    out = Console(file=io.StringIO(), width=60)
    table = Table("name", "why")
    table.columns[0].no_wrap = True
    table.add_row("n" * 30, "a word " * 30)
    print_table(table, out)
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    # 30 of the name, 50 of the reason at least, and what is between.
    assert {len(line) for line in lines} == {30 + 50 + 7}
