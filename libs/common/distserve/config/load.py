"""File < environment < command line, merged key by key. Nothing unknown or impossible gets through."""

import difflib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from distserve.config.checks import problems
from distserve.config.sections import Config
from distserve.config.settings import ENV_PREFIX, Setting, settings
from distserve.errors import ConfigError

CONFIG_VARIABLE = "DISTSERVE_CONFIG"
# Not settings: the file, the cache folder, the key that `distserve monitor` shows.
RESERVED_VARIABLES = frozenset({CONFIG_VARIABLE, "DISTSERVE_CACHE", "DISTSERVE_API_KEY"})
RENAMED = {
    f"transport.dscp_{name}": f"transport.classes.{name}.dscp" for name in ("decode", "prefill", "background")
}  # what was once a key -> what it is now

Raw = tuple[str, object, str]  # key, value as given, where it came from


def load_config(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """The effective configuration.

    path: a YAML file; None: the one that `env` names in DISTSERVE_CONFIG, if any. env: usually os.environ; keys that
    don't start with DISTSERVE_ are ignored. overrides: `section.key` -> value or text, from the command line.
    defaults: of one command, in place of the settings' own; anything given wins over them.
    Raises ConfigError with the key, its value, where it came from and what would do.
    """
    env = env or {}
    if path is None and env.get(CONFIG_VARIABLE):
        path = Path(env[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    given = [*_from_file(path), *_from_environment(env), *_from_command(overrides or {}, "command line")]
    for key, raw, origin in [*_from_command(defaults or {}, "the command's default"), *given]:
        setting = settings()[key]
        values[key] = setting.value(raw, origin)
        origins[key] = origin
    config: Config = _with(Config(), values)
    for key, expected in problems(config):
        raise settings()[key].refusal(get(config, key), origins.get(key, "the default"), expected)
    return config


def get(config: Config, key: str) -> Any:
    """The value of `section.key`."""
    return functools.reduce(getattr, key.split("."), config)


def as_environment(config: Config) -> dict[str, str]:
    """Variables that make load_config() give this configuration again: whatever isn't the default."""
    return {s.env: s.text(get(config, s.key)) for s in settings().values() if get(config, s.key) != s.default}


def as_yaml(config: Config) -> str:
    """The whole tree as a file that load_config() reads."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def _with(section: Any, values: Mapping[str, Any]) -> Any:
    """The section with some values changed, by key relative to it."""
    own = {key: value for key, value in values.items() if "." not in key}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if "." in key:
            name, rest = key.split(".", 1)
            below.setdefault(name, {})[rest] = value
    nested = {name: _with(getattr(section, name), parts) for name, parts in below.items()}
    return msgspec.structs.replace(section, **own, **nested)


def _from_file(path: Path | None) -> Iterator[Raw]:
    if path is None:
        return
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the configuration {path} can't be read: {e}", key=str(path), expected="a YAML file") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"the configuration {path} is not YAML: {e}", key=str(path), expected="a YAML file") from e
    if root is None:
        return
    yield from _from_section(root, path, "", {})


def _from_section(node: yaml.Node, path: Path, section: str, seen: dict[str, str]) -> Iterator[Raw]:
    """What a mapping of the file sets. `section` is its key, empty for the whole file; `seen`: keys set so far."""
    sections = _sections_in(section)
    expected = "keys and values" if section else f"sections: {', '.join(sections)}"
    for key_node, value_node in _pairs(node, path, section, expected):
        key, where = f"{section}.{key_node.value}".removeprefix("."), _where(path, key_node)
        if key in sections:
            if not _is_null(value_node):  # a section with every line commented out
                yield from _from_section(value_node, path, key, seen)
            continue
        if key not in settings():
            raise _unknown(key, where, [*settings(), *sections] if section else sections)
        if key in seen:
            raise ConfigError(f"{key} is set twice: {seen[key]} and {where}", key=key, expected="one of them")
        seen[key] = where
        yield key, _written(settings()[key], value_node, where), where


def _sections_in(section: str) -> list[str]:
    """The sections directly within one, by key; within "": the outermost."""
    depth = section.count(".") + 2 if section else 1
    prefix = f"{section}." if section else ""
    inside = (s.section for s in settings().values() if f"{s.section}.".startswith(prefix))
    return list(dict.fromkeys(".".join(s.split(".")[:depth]) for s in inside if s != section))


def _from_environment(env: Mapping[str, str]) -> Iterator[Raw]:
    by_name = {s.env: s for s in settings().values()}
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name in RESERVED_VARIABLES:
            continue
        if name not in by_name:
            raise _unknown(name, "environment", [*by_name, *RESERVED_VARIABLES])
        yield by_name[name].key, text, f"environment variable {name}"


def _from_command(values: Mapping[str, object], origin: str) -> Iterator[Raw]:
    for key, value in values.items():
        if key not in settings():
            raise _unknown(key, origin, list(settings()))
        yield key, value, origin


def _pairs(node: yaml.Node, path: Path, key: str, expected: str) -> list[tuple[yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        return list(node.value)
    what = key or "the file"
    raise ConfigError(f"{what} ({_where(path, node)}) must hold {expected}", key=what, expected=expected)


def _written(setting: Setting, node: yaml.Node, where: str) -> object:
    # The text as written, typed by the field: `cpus: 3` is text and `port: "80"` a number, as in the environment.
    if setting.is_list and isinstance(node, yaml.SequenceNode):
        return [_written(setting, part, where) for part in node.value]
    if not isinstance(node, yaml.ScalarNode):
        raise setting.refusal("a list or mapping", where)
    if _is_null(node):
        raise setting.refusal("empty", where, f"{setting.expected}, or the line left out for the default")
    return str(node.value)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _where(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "_").upper()


def _unknown(key: str, origin: str, known: list[str]) -> ConfigError:
    renamed = RENAMED | {_variable(old): _variable(new) for old, new in RENAMED.items()}
    if key in renamed:
        return ConfigError(f"{key} ({origin}) is now {renamed[key]}", key=key, expected=renamed[key])
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not close and "." in key:  # the right key under the wrong section
        close = [k for k in known if k.endswith("." + key.rsplit(".", 1)[1])][:1]
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
    return ConfigError(f"{key} ({origin}) is no setting; {hint}", key=key, expected=close[0] if close else "")
