"""`distserve kv …`: looking into the KV store, a node that runs or a folder that none uses."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from distserve.config import Config, load_config
from distserve.errors import ConfigError
from distserve.kv.hashing import tenant_of

SALT_VARIABLE = "KV_CACHE_SALT"

kv_app = typer.Typer(help="The KV store: a node that runs, or its folder.", no_args_is_help=True)

Row = dict[str, Any]

_ALL = 1 << 62  # blocks: more than there can be

FolderArgument = Annotated[Path | None, typer.Argument(help="A store's folder that no node uses; else a running node.")]
NodeOption = Annotated[str, typer.Option("--node", help="A node's id; else every node there is.")]
UrlOption = Annotated[str | None, typer.Option("--nats-url", help="NATS server of the running nodes.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file; else $DISTSERVE_CONFIG.")]
ConversationOption = Annotated[str, typer.Option("--conversation", help="Its name, as requests gave it.")]
SaltOption = Annotated[
    bool, typer.Option("--salt-from-stdin", help="The tenant's cache salt is read there; else $KV_CACHE_SALT.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document a node or folder.")]


@kv_app.command("ls")
def ls(
    folder: FolderArgument = None,
    node: NodeOption = "",
    nats_url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List conversations."""
    if folder is not None:
        found = [plain(one) for one in offline("ls")(folder)]
    else:
        from distserve.kv_nodes import conversations

        found = asyncio.run(conversations(settings(config, nats_url), node))
    show(found, as_json)


@kv_app.command("stat")
def stat(
    folder: FolderArgument = None,
    node: NodeOption = "",
    nats_url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is there: blocks and bytes in each tier, hits, pins, leases, what is wrong."""
    if folder is not None:
        found = [plain(offline("stat")(folder))]
    else:
        from distserve.kv_nodes import statistics

        found = asyncio.run(statistics(settings(config, nats_url), node))
    show(found, as_json)


@kv_app.command("verify")
def verify(
    folder: FolderArgument = None,
    node: NodeOption = "",
    nats_url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every block on disk and check it; set aside what is damaged. Exit status 1 if something was, or could not
    be read."""
    if folder is not None:
        found: list[Row] = [offline("verify")(folder)._asdict()]
    else:
        from distserve.kv_nodes import verified

        found = asyncio.run(verified(settings(config, nats_url), node))
    show(found, as_json)
    if any(row.get("num_damaged") or row.get("num_unreadable") for row in found):
        raise SystemExit(1)


@kv_app.command("delete")
def delete(
    conversation: ConversationOption = "",
    salt_from_stdin: SaltOption = False,
    everything: Annotated[bool, typer.Option("--all", help="All of the tenant's, not one conversation.")] = False,
    nats_url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a conversation's blocks, or all of a tenant's, from every node's memory, disk and objects, for good."""
    if bool(conversation) == everything:
        raise typer.BadParameter("name one conversation by --conversation, or all of the tenant's by --all")
    from distserve.kv_nodes import deleted

    show(asyncio.run(deleted(settings(config, nats_url), tenant(salt_from_stdin), conversation)), as_json)


@kv_app.command("pin")
def pin(
    *,
    conversation: ConversationOption,
    ttl_s: Annotated[float, typer.Option("--ttl-s", min=0, help="For so many seconds.")] = 3600.0,
    salt_from_stdin: SaltOption = False,
    nats_url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a conversation's blocks on every node, whatever else comes, within kvstore.vip_quota."""
    from distserve.kv_nodes import pinned

    show(asyncio.run(pinned(settings(config, nats_url), tenant(salt_from_stdin), conversation, ttl_s)), as_json)


@kv_app.command("unpin")
def unpin(
    *,
    conversation: ConversationOption,
    salt_from_stdin: SaltOption = False,
    nats_url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a pinned conversation's blocks compete again."""
    from distserve.kv_nodes import unpinned

    show(asyncio.run(unpinned(settings(config, nats_url), tenant(salt_from_stdin), conversation)), as_json)


def tenant(salt_from_stdin: bool) -> str:
    """Whose blocks: of the cache salt in $KV_CACHE_SALT or on standard input, which a list of processes does not
    show; without one, those of requests that named none."""
    salt = sys.stdin.read().rstrip("\n") if salt_from_stdin else os.environ.get(SALT_VARIABLE, "")
    return tenant_of(salt)


@kv_app.command("prune")
def prune(
    folder: FolderArgument = None,
    keep_blocks: Annotated[
        int | None,
        typer.Option("--keep-blocks", min=0, help="Blocks that may stay below memory; 0: everything there goes."),
    ] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Of a folder: only files that were set aside go, no block.")
    ] = False,
    node: NodeOption = "",
    nats_url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evict from disk, then from objects, the least valuable first, and give the space back. Of a folder, files that
    were set aside (*.damaged, *.foreign) are removed too."""
    if (keep_blocks is None) != set_aside:
        raise typer.BadParameter("say how many blocks may stay by --keep-blocks, or of a folder --set-aside")
    if folder is not None:
        found = [plain(offline("prune")(folder, _ALL if keep_blocks is None else keep_blocks))]
    elif keep_blocks is None:
        raise typer.BadParameter("--set-aside needs a folder: files that were set aside are no running node's")
    else:
        from distserve.kv_nodes import pruned

        found = asyncio.run(pruned(settings(config, nats_url), node, keep_blocks))
    show(found, as_json)


def plain(found: object) -> Row:
    """A dataclass or struct as names and values."""
    row: Row = msgspec.to_builtins(found)
    return row


def offline(name: str) -> Callable[..., Any]:
    """`name` of what the entry point `kv` of group `distserve.tools` has: the code that reads folders is the store's
    own, and not imported from here."""
    found = [e for e in entry_points(group="distserve.tools") if e.name == "kv"]
    if not found:
        raise ConfigError("the KV store is not installed: pip install 'distserve[kvstore]'", value="kv")
    try:
        module = found[0].load()
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("distserve"):
            raise
        raise ConfigError(f"a store's folder needs {e.name}: pip install 'distserve[kvstore]'", value="kv") from e
    call: Callable[..., Any] = getattr(module, name)
    return call


def settings(file: Path | None, nats_url: str | None) -> Config:
    """Raises ConfigError unless it says where NATS is."""
    overrides: dict[str, object] = {} if nats_url is None else {"bus.url": nats_url}
    config = load_config(file, os.environ, overrides)
    if not config.bus.url:
        raise ConfigError(
            "bus.url is empty, but a running node is asked over NATS: --nats-url nats://HOST:4222 (of `distserve up`: "
            "what it prints), or name a folder",
            key="bus.url",
            value="",
            expected="nats://HOST:PORT",
        )
    return config


def show(rows: list[Row], as_json: bool) -> None:
    """One row a line: as JSON, or `name value` pairs with what is nested below. Exits with 1 if one says "error"."""
    if not rows:
        print("nothing there")
    for row in rows:
        if as_json:
            print(msgspec.json.encode(row).decode())
            continue
        print("  ".join(f"{k} {v}" for k, v in row.items() if not isinstance(v, dict)))
        for key, nested in ((k, v) for k, v in row.items() if isinstance(v, dict)):
            for name, value in nested.items():
                inner = " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
                print(f"  {key} {name}: {inner}")
    if any("error" in row for row in rows):
        raise SystemExit(1)
