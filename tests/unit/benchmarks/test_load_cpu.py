"""Who used the cores, and processes that are ended for certain."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.load_cpu import Meter, born, children, memory_bytes
from benchmarks.load_floor import weight_bytes
from benchmarks.load_server import Server, free_port

BURN = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass"


def test_cpu_time_is_counted_for_the_group_that_used_it() -> None:
    code = f"input()\n{BURN}\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as burner:
        assert burner.stdin is not None
        assert burner.stdout is not None
        meter = Meter({"burner": [burner.pid], "nobody": []}, alone={"us": os.getpid()})
        burner.stdin.write(b"\n")
        burner.stdin.flush()
        burner.stdout.readline()  # it has burnt
        used = meter.used()
        burner.communicate(b"\n")
    assert used.by["burner"] * used.wall_s >= 0.2
    assert used.by["nobody"] == 0
    assert used.by["us"] < used.by["burner"]


def test_a_tree_has_grandchildren() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN + chr(10) + 'input()'!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as root:
        deadline = time.monotonic() + 30
        while len(children(root.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        tree = children(root.pid)
        assert len(tree) == 2
        assert memory_bytes(tree) > memory_bytes(tree[:1]) > 0
        root.communicate(b"\n")
    assert born(root.pid) == 0


def test_a_process_that_has_ended_is_gone_even_if_nobody_asked_for_its_status() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert born(process.pid)
    process.stdin.close()  # type: ignore[union-attr]
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert born(process.pid) == 0
    process.wait()


SERVE = """
import http.server, os, signal, subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(helper.pid, flush=True)
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *a):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ok).serve_forever()
"""


@pytest.mark.parametrize("manners", ["polite", "stubborn"])
def test_a_server_leaves_no_process_behind(tmp_path: Path, manners: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.load_server._STOP_S", 0.5)
    port = free_port()
    command = [sys.executable, "-c", SERVE, str(port), manners]
    with Server("s", command, tmp_path / "s.log", port=port, health="/", env=os.environ) as server:
        server.wait_ready(30)
        helper = int(server.log.read_text().split()[0])
        assert born(helper)
    deadline = time.monotonic() + 10
    while born(helper) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert born(helper) == 0
    assert born(server.pid) == 0


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with Server("s", command, tmp_path / "s.log", port=free_port(), health="/", env=os.environ) as server:
        with pytest.raises(RuntimeError, match="no such model"):
            server.wait_ready(30)


def safetensors(path: Path, **sizes: int) -> None:
    head, offset = b"", 0
    for name, size in sizes.items():
        head += b'"%b":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]},' % (
            name.encode(),
            size,
            offset,
            offset + size,
        )
        offset += size
    text = b"{" + head + b'"__metadata__":{"format":"pt"}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))


def test_a_step_reads_a_tied_table_and_of_two_only_the_head(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", embed_tokens=100, layer=40)
    assert weight_bytes(tmp_path) == 140
    safetensors(tmp_path / "b.safetensors", lm_head=100)
    assert weight_bytes(tmp_path) == 140
