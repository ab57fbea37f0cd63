"""API keys as a file holds them: hashed, each with a name, classes and limits.

A key is 32 random bytes, of which a plain SHA-256 is kept. Slow, salted hashes are for passwords, which people choose
and others can guess; nobody finds 256 random bits by trying, however fast, and every request would pay for the
slowness.
"""

import difflib
import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import yaml
from msgspec import Meta

from distserve.errors import ConfigError
from distserve.messages import Priority

SETTING = "gateway.keys_file"
PREFIX = "ds-"
KEY_BYTES = 32
MAX_SLO_MS = 86_400_000  # a day
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # the best first

Milliseconds = Annotated[float, Meta(gt=0, le=MAX_SLO_MS)]
Count = Annotated[int, Meta(ge=1, le=10**12)]


def is_sendable(text: str) -> bool:
    """It can be a header's value: Latin-1 without control characters."""
    return all(32 <= ord(c) < 127 or 160 <= ord(c) < 256 for c in text)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What the holder of a key may do, and what holds for requests that say nothing. None: no limit, no default."""

    name: Annotated[str, Meta(pattern=NAME)]  # the tenant's
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    models: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)] | None = None
    priority: Priority | None = None
    priorities: Annotated[tuple[Priority, ...], Meta(min_length=1)] | None = None
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"

    @property
    def allowed(self) -> tuple[Priority, ...]:
        """Priorities that its requests may name: those listed, else its own and the ones below."""
        if self.priorities is not None:
            return self.priorities
        return PRIORITIES[PRIORITIES.index(self.priority or "normal") :]

    @property
    def default_priority(self) -> Priority:
        return self.priority or ("normal" if "normal" in self.allowed else self.allowed[0])

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


_MS = f"a number of milliseconds above 0 and at most {MAX_SLO_MS}"
_COUNT = f"a whole number from 1 to {10**12}"
EXPECTED = {
    "name": "1 to 64 letters, digits, '.', '_' and '-', the first a letter or a digit (in quotes if only digits)",
    "sha256": "the SHA-256 of the key, 64 hexadecimal digits in lower case, in quotes",
    "models": "a list of at least one model's name",
    "priority": f"one of {', '.join(PRIORITIES)}",
    "priorities": f"a list of at least one of {', '.join(PRIORITIES)}",
    "ttft_slo_ms": _MS,
    "tpot_slo_ms": _MS,
    "deadline_ms": _MS,
    "requests_per_minute": _COUNT,
    "tokens_per_minute": _COUNT,
    "max_concurrent": _COUNT,
}


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def tenant_salt(name: str, cache_salt: str = "") -> str:
    """What enters block hashes for the key of this name: no two keys share it, and no user's own salt can be like it,
    since that has no unprintable characters. Without a key ("") the user's own."""
    return f"\0key\0{name}\0{cache_salt}" if name else cache_salt


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises ConfigError naming file, entry and field; also if there is none: nobody could ask."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise _refusal(path, f"can't be read: {e}", "a YAML file of API keys") from e
    keys = parse_keys(text, path)
    if not keys:
        raise _refusal(path, "has no key", "at least one (`distserve key new`)")
    return keys


def parse_keys(text: str, path: Path) -> tuple[ApiKey, ...]:
    """As load_keys(), of a text; it may hold none. `path` is for messages."""
    try:
        root, entries = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except RecursionError:
        raise _refusal(path, "is nested too deeply", "a list of entries") from None
    except (yaml.YAMLError, ValueError) as e:
        # Not the library's own words, which quote the file: it may hold a key by mistake.
        at = f" at line {e.problem_mark.line + 1}" if isinstance(e, yaml.MarkedYAMLError) and e.problem_mark else ""
        raise _refusal(path, f"is not YAML{at}", "a list of entries") from None
    if root is None:
        return ()
    if not isinstance(root, yaml.SequenceNode):
        raise _refusal(path, "holds no list", "a list of entries, each with name and sha256")
    keys: list[ApiKey] = []
    for i, (node, raw) in enumerate(zip(root.value, entries, strict=True), start=1):
        _refuse_doubles(node, _at(path, i, raw))
        key = _entry(raw, _at(path, i, raw))
        for j, other in enumerate(keys, start=1):
            for field in ("name", "sha256"):
                if getattr(key, field) == getattr(other, field):
                    raise _refusal(_at(path, i, raw), f"{field} is that of entry {j}", "one of its own")
        keys.append(key)
    return tuple(keys)


def check_name(name: str) -> None:
    """Raises ConfigError unless an API key may be called so."""
    if not re.search(NAME, name):
        raise ConfigError(
            f"{name!r} is no API key's name, must be {EXPECTED['name']}",
            key="name",
            value=name,
            expected=EXPECTED["name"],
        )


def _entry(raw: object, where: str) -> ApiKey:
    if not isinstance(raw, dict):
        raise _refusal(where, "is no mapping", "fields such as name and sha256")
    for field, value in raw.items():
        if field not in EXPECTED:
            close = difflib.get_close_matches(str(field), EXPECTED, n=1, cutoff=0.5)
            known = f"did you mean {close[0]}?" if close else f"known: {', '.join(EXPECTED)}"
            raise _refusal(where, f"{str(field)[:60]} is no field of a key", known, joint="; ")
        if value is None:  # a list with every line commented out would allow everything
            raise _refusal(where, f"{field} is empty", f"{EXPECTED[field]}, or the line left out")
    for field in ("name", "sha256"):
        if field not in raw:
            raise _refusal(where, f"{field} is missing", EXPECTED[field])
    try:
        key = msgspec.convert(raw, ApiKey)
    except msgspec.ValidationError as e:
        found = re.search(r"\$\.(\w+)", str(e))
        field = found[1] if found else "name"
        raise _refusal(where, f"{field} is {_shown(field, raw[field])}", EXPECTED[field]) from None
    if key.priority is not None and key.priority not in key.allowed:
        raise _refusal(where, f"priority is {key.priority!r}", f"among its priorities, {', '.join(key.allowed)}")
    return key


def _refuse_doubles(node: yaml.Node, where: str) -> None:
    seen: set[str] = set()
    for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        field = str(name.value)
        if field in seen:
            raise _refusal(where, f"{field[:60]} is set twice", "set once")
        seen.add(field)


def _shown(field: str, value: Any) -> str:
    """Never what may be a key, put where its hash belongs."""
    if field == "sha256":
        return "a key itself" if str(value).startswith(PREFIX) else "something else"
    return repr(value)[:60]


def _at(path: Path, number: int, raw: object) -> str:
    name = raw.get("name") if isinstance(raw, dict) else None
    return f"{path}, entry {number}" + (f" ({name[:64]!r})" if isinstance(name, str) else "")


def _refusal(where: object, problem: str, expected: str, *, joint: str = ", must be ") -> ConfigError:
    return ConfigError(f"{SETTING}: {where}: {problem}{joint}{expected}", key=SETTING, expected=expected)
