"""Runs in the guest: starts commands that it is sent over a virtio-serial port, and tells when they have ended.

One JSON object a line. From the lab: {"op": "clock", "time_ns"}, {"op": "start", "id", "command", "env", "cwd",
"output", "input"}, {"op": "signal", "id", "signal"}, {"op": "input", "id", "text"} (null: the end of input). To the
lab: {"event": "ready"}, {"event": "started", "id", "pid"}, {"event": "ended", "id", "status"}, {"event": "refused",
"id", "reason"}. What a command prints goes straight into its file in the shared folder. Needs nothing but Python.
When the lab goes away the port hangs up and the agent ends, and the guest with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

PORT_NAME = "distserve.lab"


class Agent:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def serve(self) -> None:
        """Until the port hangs up."""
        self._tell(event="ready")
        buffer = b""
        while data := os.read(self._fd, 1 << 16):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        op, process = order["op"], self._running.get(order.get("id", 0))
        if op == "clock":
            time.clock_settime_ns(time.CLOCK_REALTIME, order["time_ns"])
        elif op == "start":
            self._start(order)
        elif process is None:
            return  # it has ended meanwhile
        elif op == "signal":
            try:
                os.killpg(process.pid, order["signal"])
            except ProcessLookupError:
                pass
        elif op == "input" and process.stdin is not None:
            try:
                if order["text"] is None:
                    process.stdin.close()
                else:
                    process.stdin.write(order["text"].encode())
                    process.stdin.flush()
            except BrokenPipeError:
                pass

    def _start(self, order: dict[str, Any]) -> None:
        try:
            with open(order["output"], "ab") as output:
                process = subprocess.Popen(
                    order["command"],
                    env=order["env"],
                    cwd=order["cwd"],
                    stdin=subprocess.PIPE if order["input"] else subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as e:
            self._tell(event="refused", id=order["id"], reason=f"{order['command'][0]}: {e}")
            return
        self._running[order["id"]] = process
        self._tell(event="started", id=order["id"], pid=process.pid)
        threading.Thread(target=self._await_end, args=(order["id"], process), daemon=True).start()

    def _await_end(self, number: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        self._running.pop(number, None)
        self._tell(event="ended", id=number, status=status)

    def _tell(self, **event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


def open_port() -> int:
    """There is no udev here that would make a link by the port's name."""
    for entry in Path("/sys/class/virtio-ports").iterdir():
        name = entry / "name"
        if name.exists() and name.read_text().strip() == PORT_NAME:
            return os.open(f"/dev/{entry.name}", os.O_RDWR)
    raise SystemExit(f"lab: there is no virtio port {PORT_NAME}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Agent(open_port()).serve()
