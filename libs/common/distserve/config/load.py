"""File < environment < command line, merged key by key. Nothing unknown or impossible gets through."""

import difflib
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
RESERVED_VARIABLES = frozenset({CONFIG_VARIABLE, "DISTSERVE_CACHE"})  # not settings: the file, and the cache folder

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
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    given = [*_from_file(path), *_from_environment(env), *_from_command(overrides or {}, "command line")]
    for key, raw, origin in [*_from_command(defaults or {}, "the command's default"), *given]:
        setting = settings()[key]
        values.setdefault(setting.section, {})[setting.name] = setting.value(raw, origin)
        origins[key] = origin
    config = msgspec.convert(values, Config)
    for key, expected in problems(config):
        raise settings()[key].refusal(get(config, key), origins.get(key, "the default"), expected)
    return config


def get(config: Config, key: str) -> Any:
    """The value of `section.key`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def as_environment(config: Config) -> dict[str, str]:
    """Variables that make load_config() give this configuration again: whatever isn't the default."""
    return {s.env: _text(get(config, s.key)) for s in settings().values() if get(config, s.key) != s.default}


def as_yaml(config: Config) -> str:
    """The whole tree as a file that load_config() reads."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    sections = list(dict.fromkeys(s.section for s in settings().values()))
    seen: dict[str, str] = {}
    for name_node, section_node in _pairs(root, path, "", f"sections: {', '.join(sections)}"):
        section, where = str(name_node.value), _where(path, name_node)
        if section not in sections:
            raise _unknown(section, where, sections)
        if _is_null(section_node):
            continue  # a section with every line commented out
        for key_node, value_node in _pairs(section_node, path, section, "keys and values"):
            key, where = f"{section}.{key_node.value}", _where(path, key_node)
            if key not in settings():
                raise _unknown(key, where, list(settings()))
            if key in seen:
                raise ConfigError(f"{key} is set twice: {seen[key]} and {where}", key=key, expected="one of them")
            seen[key] = where
            yield key, _scalar(settings()[key], value_node, where), where


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


def _scalar(setting: Setting, node: yaml.Node, where: str) -> str:
    # The text as written, typed by the field: `cpus: 3` is text and `port: "80"` a number, as in the environment.
    if not isinstance(node, yaml.ScalarNode):
        raise setting.refusal("a list or mapping", where)
    if _is_null(node):
        raise setting.refusal("empty", where, f"{setting.expected}, or the line left out for the default")
    return str(node.value)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _where(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _unknown(key: str, origin: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not close and "." in key:  # the right key under the wrong section
        close = [k for k in known if k.endswith("." + key.split(".", 1)[1])][:1]
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
    return ConfigError(f"{key} ({origin}) is no setting; {hint}", key=key, expected=close[0] if close else "")
