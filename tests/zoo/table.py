"""Shows rows as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from tests.zoo.measuring import Row

_COLUMNS = (
    "family", "part", "experts", "graphs", "rewritten", "form", "router",
    "error", "gradient error", "compiles", "GE nodes", "seconds", "gaps",
)  # fmt: skip


def table_of(rows: Iterable[Row]) -> Table:
    """Return the table of `rows`, in their order, and a line of totals."""
    rows = list(rows)
    table = Table(title="MoE families of transformers", show_footer=True)
    for column, total in zip(_COLUMNS, _totals(rows), strict=True):
        table.add_column(column, footer=total, overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    return [
        row.family,
        row.part,
        row.experts or "own",
        str(row.graphs),
        f"{row.rewritten} / {row.layers}",
        row.form,
        row.router,
        _number(row.error),
        _number(row.gradient_error),
        "" if row.compiles is None else str(row.compiles),
        str(row.ge_nodes),
        f"{row.seconds:.1f}",
        "\n".join(row.gaps),
    ]


def _totals(rows: list[Row]) -> list[str]:
    whole = [row for row in rows if not row.gaps]
    return [
        f"{len(rows)} rows",
        "",
        "",
        f"{sum(row.graphs == 1 for row in rows)} of {len(rows)} one",
        f"{sum(row.rewritten for row in rows)} / {sum(row.layers for row in rows)}",
        "",
        "",
        _number(max((row.error for row in rows if row.error is not None), default=None)),
        _number(
            max((r.gradient_error for r in rows if r.gradient_error is not None), default=None)
        ),
        "",
        "",
        f"{sum(row.seconds for row in rows):.0f}",
        f"{len(rows) - len(whole)} with gaps",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"
