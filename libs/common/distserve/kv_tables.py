"""What `distserve kv` prints for people. Plain text; the fields' names say what they are: num_ counts, _bytes, _s."""

from collections.abc import Iterator, Sequence
from typing import Any

from distserve.sizing import in_words

Row = dict[str, Any]

_TIER = {  # heading -> field of TierStats
    "blocks": "num_blocks",
    "size": "num_bytes",
    "capacity": "capacity_bytes",
    "hits": "num_hits",
    "read": "num_read_blocks",
    "written": "num_written_blocks",
    "evicted": "num_evicted",
    "errors": "num_errors",
    "state": "state",
}


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """A table of those that are alike; a node's statistics with a table of its tiers; last, who could not answer."""
    alike = [row for row in rows if not ("tiers" in row or "error" in row)]
    if len(alike) == 1:
        width = max(map(len, map(_heading, alike[0])))
        yield from (f"{_heading(name):<{width}}  {in_text(name, value)}" for name, value in alike[0].items())
    elif alike:
        headings = list(alike[0])
        yield from table(
            [_heading(name) for name in headings], [[in_text(n, row.get(n, "")) for n in headings] for row in alike]
        )
    for row in rows:
        if "tiers" in row:
            yield from _node(row)
    for row in rows:
        if "error" in row:
            yield f"{row['node']} ({row['status']}): {row['error']}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they must be; numbers, which begin with a digit in every row, to the right."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(headings)
    widths = [max(map(len, (heading, *column))) for heading, column in zip(headings, columns, strict=True)]
    right = [all(text[:1].isdigit() or text == "-" for text in column) for column in columns]
    for cells in (headings, *rows):
        parts = (
            f"{text:>{width}}" if to_right else f"{text:<{width}}"
            for text, width, to_right in zip(cells, widths, right, strict=True)
        )
        yield "  ".join(parts).rstrip()


def in_text(name: str, value: object) -> str:
    """With its unit, which the field's name says."""
    match value:
        case dict():
            return " ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k}={v}" for k, v in value.items()) or "-"
        case list() | tuple():
            return "; ".join(map(str, value)) or "-"
        case bool() | str():
            return str(value) or "-"
        case int() | float() if name.endswith("_bytes"):
            return in_words(value)
        case int() | float() if name.endswith("_s"):
            return duration(value)
        case int():
            return f"{value:,}"
    return str(value)


def duration(seconds: float) -> str:
    """`8040` -> `2 h 14 min`: the two largest units."""
    left = round(seconds)
    for name, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if left >= size:
            return f"{left // size} {name} {left % size // part} {smaller}"
    return f"{left} s"


def _heading(name: str) -> str:
    for affix in ("num_", "_bytes", "_s"):
        name = name.removeprefix(affix) if affix.endswith("_") else name.removesuffix(affix)
    return name.replace("_", " ")


def _node(row: Row) -> Iterator[str]:
    """One node's StoreStats."""
    yield f"{row['node']}: {row['status']}, model {row['model']}, up {duration(row['uptime_s'])}"
    for reason in row["reasons"]:
        yield f"  ! {reason}"
    asked, found = row["num_looked_up_blocks"], row["num_hit_blocks"]
    yield (
        f"  {row['num_blocks']:,} blocks of {row['num_conversations']:,} conversations; {row['num_pinned']:,} pinned; "
        f"{row['num_leases']:,} offers under way"
    )
    yield f"  {row['num_lookups']:,} lookups of {asked:,} blocks; {found:,} found and pinned"
    tiers = [
        [tier, *(_of_tier(field, stats[field]) for field in _TIER.values())] for tier, stats in row["tiers"].items()
    ]
    if tiers:
        yield from ("  " + line for line in table(["tier", *_TIER], tiers))
    yield f"  layout {row['layout'] or 'not known yet'}"


def _of_tier(field: str, value: object) -> str:
    return "no limit" if field == "capacity_bytes" and not value else in_text(field, value)
