"""What one check has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]
Measure = str | int | float | bool | None

STATUSES: tuple[Status, ...] = ("ok", "warn", "fail", "skip")


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` is `<group>.<name>`, the same in every release; `subject` what was looked at (a device, a peer), if there
    can be several. `mend` is the command, or several, one a line, that would make it ok. `measures` are the figures
    behind `found`, their units in their names."""

    check: str
    status: Status
    found: str
    mend: str = ""
    subject: str = ""
    measures: Mapping[str, Measure] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.check.partition(".")[0]

    @property
    def name(self) -> str:
        return self.check.partition(".")[2]


def ok(check: str, found: str, subject: str = "", /, **measures: Measure) -> Finding:
    return Finding(check, "ok", found, "", subject, measures)


def skip(check: str, why: str, subject: str = "", mend: str = "") -> Finding:
    """Not looked at: `why` says what is missing for it."""
    return Finding(check, "skip", why, mend, subject)


def bad(check: str, status: Status, found: str, mend: str, subject: str = "", /, **measures: Measure) -> Finding:
    """A "warn" or a "fail"."""
    return Finding(check, status, found, mend, subject, measures)
