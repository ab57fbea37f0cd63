"""`distserve key …`: making API keys. Where they are kept is only their hashes."""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
import yaml

from distserve.api_keys import SETTING, check_name, hashed, new_key, parse_keys
from distserve.errors import ConfigError

key_app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)


@key_app.callback()
def keys() -> None:
    """API keys of the gateway."""


@key_app.command("new")
def new(
    name: Annotated[str, typer.Option("--name", help="Whose it is: the tenant's name, in logs and in `kv delete`.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="The gateway's file of keys, to append to; made if it is not there.")
    ] = None,
) -> None:
    """Make an API key and print it, this once: what is kept is its hash.

    Without --file its entry for the gateway's file is printed too.
    """
    check_name(name)
    key = new_key()
    entry = entry_of(name, key)
    if file is not None:
        append(file, entry)
    print(key)
    if file is None:
        print(f"An entry for the file that {SETTING} names:", file=sys.stderr)
        print(entry, end="")
    else:
        print(f"{name} is in {file}; running gateways read it when they start again", file=sys.stderr)
    print("The key is kept nowhere: whoever loses it needs a new one.", file=sys.stderr)


def entry_of(name: str, key: str) -> str:
    """YAML of a list with one entry. In quotes: a name of digits is no number."""
    return f'- name: "{name}"\n  sha256: "{hashed(key)}"\n'


def append(file: Path, entry: str) -> None:
    """Whoever reads the file sees it as it was or with the entry, whole. Raises ConfigError if it is not a list of keys
    to which the entry can be added."""
    file = file.resolve()  # a link stays one
    try:
        with _alone_in(file.parent):
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            _replace(file, _with(text, entry, file))
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{SETTING}: {file} can't be added to: {e}", key=SETTING, value=str(file)) from e


def _with(text: str, entry: str, file: Path) -> str:
    before = parse_keys(text, file)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    indent = " " * root.start_mark.column if root is not None else ""
    longer = text + ("\n" if text and not text.endswith("\n") else "")
    longer += "".join(indent + line for line in entry.splitlines(keepends=True))
    in_brackets = isinstance(root, yaml.CollectionNode) and root.flow_style
    if in_brackets or parse_keys(longer, file)[:-1] != before:
        raise ConfigError(
            f"{SETTING}: {file} is not a list with each entry on lines of its own ('- name: …'), so nothing can be "
            "added at its end: make the key without --file and put its entry in",
            key=SETTING,
            value=str(file),
        )
    return longer


def _replace(file: Path, text: str) -> None:
    before = file.stat() if file.exists() else None
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as new_file:
            if before is not None:
                for uid, gid in ((-1, before.st_gid), (before.st_uid, -1)):
                    with suppress(PermissionError):  # only root gives files away
                        os.fchown(handle, uid, gid)
            os.fchmod(handle, 0o600 if before is None else before.st_mode & 0o777)
            new_file.write(text)
            new_file.flush()
            os.fsync(handle)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No two add to a file at once: the second would lose what the first added."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
