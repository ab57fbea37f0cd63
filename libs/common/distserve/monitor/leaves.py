"""Every figure of a ClusterStatus by a dotted name, such as `gateway.ttft.p99` or `services.decode-1.num_running`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec

from distserve.status import ClassStatus, ClusterStatus, FlowStatus, Second, ServiceStatus, TierStatus

Leaf = float | int | str | None

ROOTS = frozenset(field.name for field in msgspec.structs.fields(ClusterStatus))


def leaves(status: ClusterStatus) -> dict[str, Leaf]:
    """Entries of lists go by what names them: a service's id, a tier, a flow's transport and class (and DSCP, if it has
    several). Of `history` it is the last second; of `warnings` and `troubles` their number."""
    found: dict[str, Leaf] = {}
    _walk("", status, found)
    return found


def near(name: str, names: Iterable[str], most: int = 6) -> list[str]:
    """Names that may have been meant, the likeliest first."""
    known = sorted(names)
    last = name.rpartition(".")[2].lower()
    alike = difflib.get_close_matches(name, known, n=most, cutoff=0.6)
    alike += [other for other in known if len(last) > 2 and last in other.lower()]
    alike += difflib.get_close_matches(name, known, n=most, cutoff=0.3)
    return list(dict.fromkeys(alike))[:most]


def _walk(prefix: str, value: object, found: dict[str, Leaf]) -> None:
    match value:
        case msgspec.Struct():
            for field in msgspec.structs.fields(type(value)):
                _walk(_join(prefix, field.name), getattr(value, field.name), found)
            if isinstance(value, ClassStatus):
                found[_join(prefix, "attainment")] = value.attainment
        case dict():
            for key, entry in value.items():
                _walk(_join(prefix, str(key)), entry, found)
        case list():
            _walk_list(prefix, value, found)
        case bool():
            found[prefix] = int(value)
        case None | int() | float() | str():
            found[prefix] = value


def _walk_list(prefix: str, entries: list[object], found: dict[str, Leaf]) -> None:
    if prefix == "history":
        if entries:
            _walk(prefix, entries[-1], found)
        else:
            found |= {_join(prefix, field.name): None for field in msgspec.structs.fields(Second)}
    elif prefix in ("warnings", "troubles"):
        found[prefix] = len(entries)
    elif all(isinstance(entry, str) for entry in entries):
        found[prefix] = "; ".join(map(str, entries))
    else:
        for entry in entries:
            names = [_join(prefix, name) for name in _names(entry)]
            name = next((n for n in names if not any(k.startswith(n + ".") for k in found)), names[-1])
            _walk(name, entry, found)


def _names(entry: object) -> list[str]:
    match entry:
        case ServiceStatus():
            return [entry.id]
        case TierStatus():
            return [entry.tier]
        case FlowStatus():
            flow = f"{entry.transport}.{entry.traffic_class}"
            return [flow, f"{flow}.{entry.dscp}"]
    raise TypeError(f"entries of type {type(entry).__name__} have no name")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
