"""Files of API keys: what they may hold, how what is wrong is said, and `distserve key new`, which adds to them."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from distserve.api_keys import PRIORITIES, hashed, load_keys, new_key, parse_keys, tenant_salt
from distserve.errors import ConfigError
from distserve.key_commands import append, entry_of, key_app
from distserve.kv.hashing import root_hash, tenant_of
from distserve.kv_commands import Tenant, kv_app
from distserve.worker.store.offers import Label

FILE = Path("keys.yaml")
A, B = "a" * 64, "b" * 64
WHOLE = f"""
- name: support
  sha256: "{A}"
  models: [smollm2, other]
  priority: normal
  priorities: [vip, normal]
  ttft_slo_ms: 300
  tpot_slo_ms: 50.5
  deadline_ms: 60000
  requests_per_minute: 60
  tokens_per_minute: 100000
  max_concurrent: 8
- {{name: batch-7, sha256: "{B}"}}
"""


def entry(**fields: object) -> str:
    return yaml.safe_dump([{"name": "a", "sha256": A} | fields])


def test_a_file_with_everything_is_read() -> None:
    support, batch = parse_keys(WHOLE, FILE)
    assert (support.name, support.models, support.priorities) == ("support", ("smollm2", "other"), ("vip", "normal"))
    assert (support.ttft_slo_ms, support.tpot_slo_ms, support.deadline_ms) == (300, 50.5, 60000)
    assert (support.requests_per_minute, support.tokens_per_minute, support.max_concurrent) == (60, 100000, 8)
    assert support.may_use("other")
    assert not support.may_use("third")
    assert batch.may_use("third")
    assert (batch.requests_per_minute, batch.ttft_slo_ms) == (None, None)
    assert A not in repr(support)


@pytest.mark.parametrize(
    ("fields", "allowed", "default"),
    [
        ({}, ("normal", "batch"), "normal"),
        ({"priority": "vip"}, PRIORITIES, "vip"),
        ({"priority": "batch"}, ("batch",), "batch"),
        ({"priorities": ["vip", "normal"]}, ("vip", "normal"), "normal"),
        ({"priorities": ["batch", "vip"]}, ("batch", "vip"), "batch"),
        ({"priorities": ["vip", "batch"], "priority": "batch"}, ("vip", "batch"), "batch"),
    ],
)
def test_a_key_may_use_what_is_listed_else_its_own_class_and_those_below(
    fields: dict[str, object], allowed: tuple[str, ...], default: str
) -> None:
    [key] = parse_keys(entry(**fields), FILE)
    assert (key.allowed, key.default_priority) == (allowed, default)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (entry(sha256="ds-" + "A" * 43), "entry 1 ('a'): sha256 is a key itself, must be the SHA-256 of the key"),
        (entry(sha256="A" * 64), "sha256 is something else, must be the SHA-256 of the key, 64 hexadecimal digits in"),
        (entry(sha256=A + "\n"), "sha256 is something else"),
        (entry(name=""), "name is '', must be 1 to 64 letters"),
        (entry(name="a b"), "name is 'a b', must be"),
        (entry(name="x" * 65), "must be 1 to 64 letters"),
        (entry(name=7), "name is 7, must be 1 to 64 letters, digits, '.', '_' and '-'"),
        (entry(name="a\n"), "must be 1 to 64 letters"),
        (entry(models=[]), "models is [], must be a list of at least one model's name"),
        (entry(models="smollm2"), "models is 'smollm2', must be a list"),
        (entry(models=[""]), "models is ['']"),
        (entry(models=None), "models is empty, must be a list of at least one model's name, or the line left out"),
        (entry(priority="VIP"), "priority is 'VIP', must be one of vip, normal, batch"),
        (entry(priorities=["vip", "high"]), "priorities is ['vip', 'high'], must be a list of at least one of vip"),
        (entry(priorities=["vip"], priority="batch"), "priority is 'batch', must be among its priorities, vip"),
        (entry(ttft_slo_ms=0), "ttft_slo_ms is 0, must be a number of milliseconds above 0"),
        (entry(tpot_slo_ms="fast"), "tpot_slo_ms is 'fast', must be a number of milliseconds"),
        (entry(deadline_ms=float("inf")), "deadline_ms is inf, must be"),
        (entry(deadline_ms=float("nan")), "deadline_ms is nan, must be"),
        (entry(requests_per_minute=0), "requests_per_minute is 0, must be a whole number from 1"),
        (entry(requests_per_minute=1.5), "requests_per_minute is 1.5, must be a whole number"),
        (entry(tokens_per_minute=True), "tokens_per_minute is True, must be a whole number"),
        (entry(max_concurrent=-1), "max_concurrent is -1, must be"),
        (entry(request_per_minute=5), "request_per_minute is no field of a key; did you mean requests_per_minute?"),
        (entry(colour="red"), "colour is no field of a key; known: name, sha256, models"),
        ("- {name: a}", "entry 1 ('a'): sha256 is missing, must be the SHA-256"),
        (f"- sha256: {A}", "entry 1: name is missing"),
        ("- a", "entry 1: is no mapping, must be fields such as name and sha256"),
        ("keys: []", "holds no list, must be a list of entries"),
        ("- {name: a", "is not YAML at line 1, must be a list of entries"),
        (f"- {{name: a, sha256: {A}, name: b}}", "name is set twice, must be set once"),
        (entry() + entry(sha256=B), "entry 2 ('a'): name is that of entry 1, must be one of its own"),
        (entry() + entry(name="b"), "entry 2 ('b'): sha256 is that of entry 1, must be one of its own"),
        ("- !!python/object:os.system {}", "is not YAML at line 1"),
    ],
)
def test_what_is_wrong_is_said_by_setting_file_entry_and_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, FILE)
    assert str(refused.value).startswith("gateway.keys_file: keys.yaml")
    assert words in str(refused.value)
    assert refused.value.key == "gateway.keys_file"


def test_a_file_nested_too_deeply_is_refused_as_any_other() -> None:
    with pytest.raises(ConfigError, match=r"keys.yaml: is nested too deeply, must be a list of entries"):
        parse_keys("[" * 5000, FILE)


def test_a_key_put_where_its_hash_belongs_is_never_repeated() -> None:
    key = new_key()
    for text in (entry(sha256=key), f"- {{sha256: {key}", f"- name: a\n  sha256: {key}: x\n"):
        with pytest.raises(ConfigError) as refused:
            parse_keys(text, FILE)
        assert key not in str(refused.value)
        assert key not in repr(refused.value.__cause__)


def test_a_file_without_keys_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_keys(tmp_path / "none.yaml")
    for text in ("", "# nothing yet\n", "[]\n"):
        (tmp_path / "keys.yaml").write_text(text)
        with pytest.raises(ConfigError, match="has no key, must be at least one"):
            load_keys(tmp_path / "keys.yaml")


def test_no_salt_of_a_user_or_another_key_makes_a_tenants() -> None:
    salts = [tenant_salt(name, salt) for name in ("", "a", "a.b", "ab") for salt in ("", "s", "b", "key")]
    assert len(set(salts)) == len({tenant_of(s) for s in salts}) == len({root_hash("f", s) for s in salts}) == 16
    assert not any(tenant_salt("a", s).isprintable() for s in ("", "s"))  # as a user's must be
    assert [tenant_salt("", s) for s in ("", "s")] == ["", "s"]


def test_kv_commands_name_a_tenant_by_its_key_and_cache_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_CACHE_SALT", raising=False)
    assert Tenant().tenant == ""
    stored = Label.of(tenant_salt("support"), "a conversation", "prefill")  # what workers tell the store
    assert Tenant(key_name="support").tenant == stored.tenant
    monkeypatch.setenv("KV_CACHE_SALT", "s")
    assert Tenant().tenant == tenant_of("s")
    assert Tenant(key_name="support").tenant == tenant_of(tenant_salt("support", "s"))
    with pytest.raises(ConfigError, match="no API key's name"):
        _ = Tenant(key_name="a b").tenant
    for command in ("delete", "pin", "unpin"):
        assert "--key-name" in CliRunner().invoke(kv_app, [command, "--help"], env={"COLUMNS": "200"}).output


# ---------------------------------------------------------------- distserve key new


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(key_app, ["new", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_a_key_has_256_random_bits_and_is_kept_as_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    _, out, said = run("--name", "support", "--file", str(file))
    key = out.strip()
    assert key.startswith("ds-")
    assert len(key) == 3 + 43
    assert hashed(key) == hashlib.sha256(key.encode()).hexdigest()
    [kept] = load_keys(file)
    assert (kept.name, kept.sha256) == ("support", hashed(key))
    assert key not in file.read_text() + said
    assert file.stat().st_mode & 0o777 == 0o600
    assert "start again" in said


def test_without_a_file_the_entry_is_printed_after_the_key() -> None:
    _, out, _ = run("--name", "007")
    key, _, rest = out.partition("\n")
    [entry] = parse_keys(rest, FILE)
    assert (entry.name, entry.sha256) == ("007", hashed(key))


@pytest.mark.parametrize(
    "text",
    ["", "# keys\n", WHOLE, WHOLE.rstrip(), "  - name: x\n    sha256: " + A, "---\n- {name: x, sha256: " + A + "}\n"],
)
def test_an_entry_is_added_at_the_end_and_nothing_else_changes(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    file.chmod(0o640)
    before = parse_keys(text, file)
    run("--name", "new.one", "--file", str(file))
    assert file.read_text().startswith(text)
    assert load_keys(file)[:-1] == before
    assert load_keys(file)[-1].name == "new.one"
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["keys.yaml"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"[{{name: x, sha256: {A}}}]\n", "make the key without --file"),
        ("[]\n", "make the key without --file"),
        (entry(name="support"), "name is that of entry 1"),
        (entry(colour="red"), "colour is no field"),
        (entry() + "...\n", "is not YAML"),
    ],
)
def test_a_file_to_which_nothing_can_be_added_stays_as_it_was_and_no_key_is_shown(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        run("--name", "support", "--file", str(file))
    assert file.read_text() == text
    assert os.listdir(tmp_path) == ["keys.yaml"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "keys.yaml").symlink_to(tmp_path / "real" / "keys.yaml")
    run("--name", "a", "--file", str(tmp_path / "keys.yaml"))
    assert (tmp_path / "keys.yaml").is_symlink()
    assert len(load_keys(tmp_path / "real" / "keys.yaml")) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_stays_its_owners(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    run("--name", "a", "--file", str(file))
    os.chown(file, 1234, 2345)
    file.chmod(0o640)
    run("--name", "b", "--file", str(file))
    found = file.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1234, 2345, 0o640)
    assert len(load_keys(file)) == 2


def test_who_may_not_give_a_file_away_adds_to_it_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    run("--name", "a", "--file", str(file))
    asked: list[tuple[int, int]] = []

    def refused(handle: int, uid: int, gid: int) -> None:
        asked.append((uid, gid))
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refused)
    run("--name", "b", "--file", str(file))
    assert asked == [(-1, os.getegid()), (os.geteuid(), -1)]
    assert len(load_keys(file)) == 2


def test_of_many_that_add_at_once_none_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    threads = [threading.Thread(target=append, args=(file, entry_of(f"k{i}", new_key()))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {key.name for key in load_keys(file)} == {f"k{i}" for i in range(20)}


def test_the_command_is_there_and_a_bad_name_ends_it_with_what_would_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distserve.cli", "key", "new", "--name", "a b", "--file", str(tmp_path / "f" / "k")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (78, "")
    assert "'a b' is no API key's name, must be 1 to 64 letters" in done.stderr
    with pytest.raises(ConfigError, match="can't be added to"):
        run("--name", "a", "--file", str(tmp_path / "f" / "k"))
