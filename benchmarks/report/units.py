"""Numbers as text with their units, behind a space at which no line ends; tables."""

from typing import NamedTuple


class Cell(NamedTuple):
    """The text of a cell of a table, with a footnote: where a number was measured, or why there is none."""

    text: object
    note: str


class Table(NamedTuple):
    """The first cell of a row is its heading. numbers: indices of the columns with numbers, each with one unit. grey:
    indices of the rows without a measurement of this machine."""

    caption: str
    head: list
    rows: list  # of texts and Cells
    numbers: tuple = ()
    grey: tuple = ()


def number(value):
    """Three significant digits: 15,264; 95.2; 0.0167. A value below 0.001 has one: 0.00004."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}" if abs(value) >= 1e-3 else f"{value:.5f}"


def seconds(value):
    """A time as text: 95.2 s, 1.87 s, 16.7 ms, 5.00 µs."""
    unit, size = ("s", 1) if value >= 0.1 else ("ms", 1e-3) if value >= 1e-4 else ("µs", 1e-6)
    return f"{number(value / size)}\N{NO-BREAK SPACE}{unit}"


def amount(count):
    """Bytes as text: 40 B, 43.6 MB."""
    unit, size = next((each for each in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= each[1]), ("B", 1))
    return f"{count / size:.3g}\N{NO-BREAK SPACE}{unit}"


def tiny(value):
    """One digit of a small number: 0, 1·10⁻⁵."""
    digit, _, power = f"{value:.0e}".partition("e")
    return f"{digit}·10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}" if value else "0"
