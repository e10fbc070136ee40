"""Tables for people, of which nothing is cut."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_PAGE = 160
"""How wide a page is at least, where there is no terminal."""

_PROSE = 50
"""How narrow a column may get that may be broken into lines."""

_PROSE_OF_TERMINAL = 30
"""The same on a terminal, which breaks itself what is longer than its lines."""

_UNBOUNDED = 100_000


def console() -> Console:
    """The terminal, or a wide page where there is none."""
    # Without markup: names and texts of the user's may hold square brackets.
    probe = Console(highlight=False, markup=False)
    return probe if probe.is_terminal else Console(highlight=False, markup=False, width=_PAGE)


def print_table(table: Table, out: Console) -> None:
    """Prints a table; where its columns need more than the page, on longer lines.

    Columns without ``no_wrap`` give way first.

    Args:
        table: The table.
        out: The terminal.
    """
    needed = _needed(table, out)
    if needed > out.width:
        table.width = needed
    out.print(table, crop=False)


def _needed(table: Table, out: Console) -> int:
    """How wide a table is with everything broken into lines that may be."""
    prose = [column for column in table.columns if not column.no_wrap]
    for column in prose:
        column.overflow = "fold"
        column.max_width = _PROSE_OF_TERMINAL if out.is_terminal else _PROSE
    options = out.options.update(max_width=_UNBOUNDED)
    needed = Measurement.get(out, options, table).maximum
    for column in prose:
        column.max_width = None
    return needed
