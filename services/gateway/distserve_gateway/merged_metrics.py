"""Expositions of several services in one: each sample says which service it is of, each family is announced once."""

from __future__ import annotations

from collections.abc import Iterable


class _Family:
    __slots__ = ("help", "samples", "type")

    def __init__(self) -> None:
        self.help = ""
        self.type = ""
        self.samples: list[str] = []


class MergedMetrics:
    """Text in, text out: Prometheus's text format, version 0.0.4. Labels are put in as they are met; what a sample says
    is never looked at."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._odd: list[str] = []

    def begin(self, service: str, role: str) -> None:
        """What add() is given from now on is this one's."""
        self._service = service
        self._labels = f'service="{_escaped(service)}",service_role="{_escaped(role)}"'
        self._family = _Family()
        self._name = ""

    def add(self, lines: Iterable[str]) -> None:
        """Lines of its exposition, in their order. A family of another type than another service's of that name is left
        out, and a comment says so: Prometheus would refuse everything."""
        for line in lines:
            if not line.startswith("#"):
                if line:
                    self._sample(line)
                continue
            words = line.split(" ", 3)
            if len(words) < 4 or words[1] not in ("HELP", "TYPE"):
                continue
            if words[2] != self._name:
                self._open(words[2])
            if words[1] == "HELP":
                self._family.help = self._family.help or line
            elif not self._family.type:
                self._family.type = line
            elif self._family.type != line:
                self._odd.append(f"# Left out: {words[2]} of {_escaped(self._service)} is a {words[3]} there")
                self._family = _Family()

    def _open(self, name: str) -> None:
        self._name = name
        self._family = self._families.setdefault(name, _Family())

    def _sample(self, line: str) -> None:
        brace, space = line.find("{"), line.find(" ")
        if space < 0:
            return
        if 0 <= brace < space:
            name, rest = line[:brace], line[brace + 1 :]
            labelled = f"{name}{{{self._labels}{'' if rest.startswith('}') else ','}{rest}"
        else:
            name = line[:space]
            labelled = f"{name}{{{self._labels}}}{line[space:]}"
        if not name.startswith(self._name) or not self._name:
            self._open(name)  # nobody has announced it
        self._family.samples.append(labelled)

    def text(self) -> str:
        lines: list[str] = []
        for family in self._families.values():
            if family.samples:
                lines += [line for line in (family.help, family.type) if line]
                lines += family.samples
        return "\n".join([*lines, *self._odd, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
