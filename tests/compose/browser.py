"""Debian's chromium without a window, driven over a pipe: Chrome's DevTools protocol, JSON messages that end in a zero
byte. Needs no driver and no library.

    with Browser(folder) as browser:
        page = browser.open("http://127.0.0.1:8000/")
        page.wait_for("document.title")
        assert page.errors == []
"""

import base64
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CALL_S = 20.0

FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root, in containers too
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def chromium() -> str:
    """Raises FileNotFoundError if there is none."""
    for name in ("chromium", "chromium-headless-shell"):
        if (found := shutil.which(name)) is not None:
            return found
    raise FileNotFoundError("no chromium: apt-get install chromium")


class Browser:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._events: dict[str, Callable[[str, dict[str, Any]], None]] = {}  # by session

    def __enter__(self) -> Self:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        command = [chromium(), *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        # It reads from descriptor 3 and writes to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash", *command],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        self._out = os.fdopen(to_write, "wb", buffering=0)
        self._in = os.fdopen(from_read, "rb")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        self._out.close()
        self._reader.join(10)
        self._in.close()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Raises RuntimeError with what the browser says is wrong, TimeoutError if it says nothing."""
        with self._arrived:
            self._number += 1
            number = self._number
            message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
            if session:
                message["sessionId"] = session
            self._out.write(json.dumps(message).encode() + b"\0")
            if not self._arrived.wait_for(lambda: number in self._answers, CALL_S):
                raise TimeoutError(f"the browser did not answer {method} within {CALL_S:g} s")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer.get("result", {}))

    def _read(self) -> None:
        buffer = b""
        while part := os.read(self._in.fileno(), 65536):
            *messages, buffer = (buffer + part).split(b"\0")
            for text in messages:
                message = json.loads(text)
                with self._arrived:
                    if "id" in message:
                        self._answers[message["id"]] = message
                        self._arrived.notify_all()
                    elif (tell := self._events.get(message.get("sessionId", ""))) is not None:
                        tell(message["method"], message["params"])

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> "Page":
        """A tab; what it asks for and complains of is noted from its first request on."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        self._events[session] = page.note
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable", session)
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        self.call("Page.navigate", session, url=url)
        return page


class Page:
    """`errors`: of the console, of scripts and of what was blocked; `requests`: URLs that were asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.errors.append(json.dumps(parameters["entry"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("warning", "error", "assert"):
            self.errors.append(json.dumps(parameters["args"]))

    def evaluate(self, expression: str) -> Any:
        """What JavaScript says. Raises RuntimeError with its exception."""
        answer = self._browser.call(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 15.0) -> Any:
        """Until it is truthy. Raises TimeoutError with the expression."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if found := self.evaluate(expression):
                    return found
            except RuntimeError:  # not loaded yet
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s: {expression}; errors: {self.errors}")
            time.sleep(0.05)

    def accessibility(self) -> list[dict[str, str]]:
        """Role and name of everything that a screen reader meets."""
        nodes = self._browser.call("Accessibility.getFullAXTree", self._session)["nodes"]
        told = [node for node in nodes if not node.get("ignored")]
        return [{key: str(node.get(key, {}).get("value", "")) for key in ("role", "name")} for node in told]

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self._browser.call(
            "Emulation.setDeviceMetricsOverride",
            self._session,
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        answer = self._browser.call(
            "Page.captureScreenshot", self._session, format="png", captureBeyondViewport=True, optimizeForSpeed=False
        )
        file.write_bytes(base64.b64decode(answer["data"]))
