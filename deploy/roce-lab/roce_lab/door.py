"""Commands from other processes into a lab that is up: a Unix socket in its folder, one JSON object a line.

To the lab: {"node", "command", "timeout_s"}. Back: {"output": the file that grows here}, then {"status", "reason"}. The
command is killed when the asker goes away.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roce_lab.errors import LabError, LabTimeout
from roce_lab.lab import Lab

NAME = ".door"


class Door:
    """Open while it is entered."""

    def __init__(self, lab: Lab) -> None:
        path = lab.folder / NAME
        path.unlink(missing_ok=True)
        self._server = _Server(str(path), _Visit)
        self._server.lab = lab
        self._thread = threading.Thread(target=self._server.serve_forever, name="lab-door", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    lab: Lab


class _Visit(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        order = json.loads(self.rfile.readline())
        try:
            process = self.server.lab.host(order["node"]).start(order["command"])
        except LabError as e:
            self._say(status=255, reason=str(e))
            return
        self._say(output=str(process.output))
        deadline = time.monotonic() + order["timeout_s"]
        self.connection.setblocking(False)
        while True:
            try:
                self._say(status=process.wait(0.1), reason="")
                return
            except LabTimeout:
                if self._left() or time.monotonic() > deadline:
                    process.kill()
            except OSError:
                return

    def _left(self) -> bool:
        try:
            return not self.connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _say(self, **what: Any) -> None:
        self.wfile.write(json.dumps(what).encode() + b"\n")


def run(folder: Path, node: int, command: str, timeout_s: float) -> int:
    """Run a command in the lab that is up in `folder`; prints what it prints, returns its status. Raises LabError if no
    lab is up there."""
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(str(folder / NAME))
        except OSError:
            raise LabError(f"no lab is up in {folder}: start one with `lab.py up`, or `lab.py up --bare`") from None
        s.settimeout(timeout_s + 60)
        s.sendall(json.dumps({"node": node, "command": command, "timeout_s": timeout_s}).encode() + b"\n")
        answers = s.makefile()
        first = json.loads(answers.readline() or '{"status": 255, "reason": "the lab went away"}')
        if "output" not in first:
            raise LabError(first["reason"])
        last: list[str] = []
        waiting = threading.Thread(target=lambda: last.append(answers.readline()), daemon=True)
        waiting.start()
        path = Path(first["output"])
        path.touch()
        with path.open(errors="replace") as output:
            while True:
                waiting.join(0.1)
                sys.stdout.write(output.read())
                sys.stdout.flush()
                if last:
                    sys.stdout.write(output.read())
                    return int(json.loads(last[0] or '{"status": 255}')["status"])
