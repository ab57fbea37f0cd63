"""docs/metrics.md as its tables say, and what services expose, in the same shape."""

import re
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
NOT_LABELS = frozenset({"le"})  # of buckets


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """A family. `labels`: empty if it has none, or no series to see them by."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        labels = ", ".join(self.labels)
        return f"| `{self.name}` | {self.kind} | {labels} | {self.text} |"


def tables(page: str) -> dict[str, list[Row]]:
    """Heading -> rows of the table under it."""
    found: dict[str, list[Row]] = {}
    heading = ""
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif match := re.fullmatch(r"\| `([\w:]+)` \| (\w+) \| ([\w, ]*) \| (.+) \|", line):
            name, kind, labels, text = match.groups()
            found.setdefault(heading, []).append(Row(name, kind, tuple(filter(None, labels.split(", "))), text))
    return found


def exposed(text: str) -> list[Row]:
    """What an exposition has, by name."""
    rows = []
    for family in text_string_to_metric_families(text):
        labels: dict[str, None] = {}
        for sample in family.samples:
            labels |= dict.fromkeys(name for name in sample.labels if name not in NOT_LABELS)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(Row(name, family.type, tuple(sorted(labels)), family.documentation))
    return sorted(rows)
