"""`distserve kv …`: looking into the KV store, a node that runs or a folder that none uses."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from distserve.api_keys import check_name, tenant_salt
from distserve.config import Config, load_config
from distserve.errors import ConfigError
from distserve.kv.hashing import tenant_of
from distserve.kv_tables import Row, lines_of

SALT_VARIABLE = "KV_CACHE_SALT"

kv_app = typer.Typer(help="The KV store: a node that runs, or its folder.", no_args_is_help=True)

_ALL = 1 << 62  # blocks: more than there can be


@dataclass(frozen=True, slots=True)
class Cluster:
    """Options of every command: where the running nodes are, and how what they say is printed."""

    nats_url: Annotated[str | None, typer.Option("--nats-url", help="NATS server of the running nodes.")] = None
    config: Annotated[Path | None, typer.Option("--config", help="YAML file; else $DISTSERVE_CONFIG.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a node or folder.")] = False

    @property
    def settings(self) -> Config:
        """Raises ConfigError unless it says where NATS is."""
        overrides: dict[str, object] = {} if self.nats_url is None else {"bus.url": self.nats_url}
        config = load_config(self.config, os.environ, overrides)
        if not config.bus.url:
            raise ConfigError(
                "bus.url is empty, but a running node is asked over NATS: --nats-url nats://HOST:4222 (of `distserve "
                "up`: what it prints), or name a folder",
                key="bus.url",
                value="",
                expected="nats://HOST:PORT",
            )
        return config

    def show(self, rows: list[Row]) -> None:
        """One row a line as JSON, or for people. Exits with 1 if one says "error"."""
        lines = (msgspec.json.encode(row).decode() for row in rows) if self.as_json else lines_of(rows)
        for line in lines:
            print(line)
        if not rows:
            print("nothing there")
        if any("error" in row for row in rows):
            raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class Place(Cluster):
    """Options of what looks into a folder, or into one node or every one."""

    folder: Annotated[Path | None, typer.Argument(help="A store's folder that no node uses; else a running node.")] = (
        None
    )
    node: Annotated[str, typer.Option("--node", help="A node's id; else every node there is.")] = ""


@dataclass(frozen=True, slots=True)
class Tenant(Cluster):
    """Options of what is said to all nodes of one tenant's blocks."""

    salt_from_stdin: Annotated[
        bool, typer.Option("--salt-from-stdin", help="The tenant's cache salt is read there; else $KV_CACHE_SALT.")
    ] = False
    key_name: Annotated[
        str, typer.Option("--key-name", help="Name of the API key of the requests, where the gateway has keys.")
    ] = ""

    @property
    def tenant(self) -> str:
        """Whose blocks: of the API key of this name, if any, and of the cache salt in $KV_CACHE_SALT or on standard
        input, which a list of processes does not show; without one, those of requests that named none. Reads standard
        input: once."""
        if self.key_name:
            check_name(self.key_name)
        salt = sys.stdin.read().rstrip("\n") if self.salt_from_stdin else os.environ.get(SALT_VARIABLE, "")
        return tenant_of(tenant_salt(self.key_name, salt))


def command(run: Callable[..., None]) -> Callable[..., None]:
    """`run` as a command of its name, with the fields of its first parameter's class as options of its own."""
    first, *own = signature(run).parameters.values()
    kind = first.annotation
    shared = signature(kind).parameters.values()

    def call(**given: Any) -> None:
        run(kind(**{p.name: given.pop(p.name) for p in shared}), **given)

    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*own, *shared)]
    call.__doc__ = run.__doc__
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(call)["__signature__"] = Signature(parameters)
    kv_app.command(run.__name__)(call)
    return run


ConversationOption = Annotated[str, typer.Option("--conversation", help="Its name, as requests gave it.")]


@command
def ls(place: Place) -> None:
    """List conversations."""
    if place.folder is not None:
        found = [plain(one) for one in offline("ls")(place.folder)]
    else:
        from distserve.kv_nodes import conversations

        found = asyncio.run(conversations(place.settings, place.node))
    place.show(found)


@command
def stat(place: Place) -> None:
    """Say what is there: blocks and bytes in each tier, hits, pins, leases, what is wrong."""
    if place.folder is not None:
        found = [plain(offline("stat")(place.folder))]
    else:
        from distserve.kv_nodes import statistics

        found = asyncio.run(statistics(place.settings, place.node))
    place.show(found)


@command
def verify(place: Place) -> None:
    """Read every block on disk and check it; set aside what is damaged. Exit status 1 if something was, or could not
    be read."""
    if place.folder is not None:
        found: list[Row] = [offline("verify")(place.folder)._asdict()]
    else:
        from distserve.kv_nodes import verified

        found = asyncio.run(verified(place.settings, place.node))
    place.show(found)
    if any(row.get("num_damaged") or row.get("num_unreadable") for row in found):
        raise SystemExit(1)


@command
def prune(
    place: Place,
    keep_blocks: Annotated[
        int | None,
        typer.Option("--keep-blocks", min=0, help="Blocks that may stay below memory; 0: everything there goes."),
    ] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Of a folder: only files that were set aside go, no block.")
    ] = False,
) -> None:
    """Evict from disk, then from objects, the least valuable first, and give the space back. Of a folder, files that
    were set aside (*.damaged, *.foreign) are removed too."""
    if (keep_blocks is None) != set_aside:
        raise typer.BadParameter("say how many blocks may stay by --keep-blocks, or of a folder --set-aside")
    if place.folder is not None:
        found = [plain(offline("prune")(place.folder, _ALL if keep_blocks is None else keep_blocks))]
    elif keep_blocks is None:
        raise typer.BadParameter("--set-aside needs a folder: files that were set aside are no running node's")
    else:
        from distserve.kv_nodes import pruned

        found = asyncio.run(pruned(place.settings, place.node, keep_blocks))
    place.show(found)


@command
def delete(
    whose: Tenant,
    conversation: ConversationOption = "",
    everything: Annotated[bool, typer.Option("--all", help="All of the tenant's, not one conversation.")] = False,
) -> None:
    """Delete a conversation's blocks, or all of a tenant's, from every node's memory, disk and objects, for good."""
    if bool(conversation) == everything:
        raise typer.BadParameter("name one conversation by --conversation, or all of the tenant's by --all")
    from distserve.kv_nodes import deleted

    whose.show(asyncio.run(deleted(whose.settings, whose.tenant, conversation)))


@command
def pin(
    whose: Tenant,
    *,
    conversation: ConversationOption,
    ttl_s: Annotated[float, typer.Option("--ttl-s", min=0, help="For so many seconds.")] = 3600.0,
) -> None:
    """Keep a conversation's blocks on every node, whatever else comes, within kvstore.vip_quota."""
    from distserve.kv_nodes import pinned

    whose.show(asyncio.run(pinned(whose.settings, whose.tenant, conversation, ttl_s)))


@command
def unpin(whose: Tenant, *, conversation: ConversationOption) -> None:
    """Let a pinned conversation's blocks compete again."""
    from distserve.kv_nodes import unpinned

    whose.show(asyncio.run(unpinned(whose.settings, whose.tenant, conversation)))


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
