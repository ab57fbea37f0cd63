"""What a gateway says over HTTP: one GET at a time, each within a deadline. The base install has no HTTP client."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from urllib.parse import urlsplit

import msgspec

from distserve.api_keys import is_sendable
from distserve.errors import ConfigError, DistServeError, Forbidden, Unauthorized, Unavailable
from distserve.status import ClusterStatus

TIMEOUT_S = 5.0
MOST_BYTES = 32 << 20  # of an answer: thousands of workers
KEY_VARIABLE = "DISTSERVE_API_KEY"


class Source:
    """A gateway. Raises ConfigError, which repeats no key and no password, if `url` is none of one or no header can
    carry `api_key`."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https"):
            shown = f"…@{url.rpartition('@')[2]}" if "@" in url else url
            raise ConfigError(
                f"--url is {shown!r}, must be http://HOST:PORT or https://HOST[:PORT]",
                value=shown,
                expected="http://HOST:PORT",
            )
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self._tls = parts.scheme == "https"
        self._host, self._port = host, port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._headers = {"accept": "*/*", "user-agent": "distserve-monitor", "connection": "close"}
        api_key = api_key.rstrip("\r\n")  # as `$(cat file)` would have it
        if not is_sendable(api_key):  # http.client would refuse it, too, and repeat it
            raise ConfigError(
                f"the API key (${KEY_VARIABLE}, --api-key) has characters that no HTTP header can carry",
                expected="Latin-1 without control characters",
            )
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def status(self) -> ClusterStatus:
        return decoded(self.status_body())

    def status_body(self) -> bytes:
        """JSON of a ClusterStatus, with what a newer server has and this release does not know."""
        return self._get("/status")

    def metrics(self) -> str:
        """Prometheus's text, of all services."""
        return self._get("/metrics/cluster").decode(errors="replace")

    def _get(self, path: str) -> bytes:
        """Raises Unavailable (it may answer later), Unauthorized, Forbidden."""
        connection: http.client.HTTPConnection
        if self._tls:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            if (sock := connection.sock) is not None:
                # A server that sends a byte now and then would never run into the socket's own timeout. As a plain
                # socket's: an ssl socket's own shutdown would take its state from under the thread that reads.
                try:
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
                except OSError:
                    pass

        timer = threading.Timer(self._timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            response = connection.getresponse()
            body = response.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as e:
            if late.is_set() or isinstance(e, TimeoutError):
                raise Unavailable(f"{self.url} did not answer within {self._timeout_s:g} s") from e
            raise Unavailable(f"{self.url}: {getattr(e, 'strerror', None) or e or type(e).__name__}") from e
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            raise Unavailable(f"{self.url} did not answer within {self._timeout_s:g} s")
        if response.status != 200:
            raise _refusal(self.url + path, response.status, body)
        if len(body) > MOST_BYTES:
            raise Unavailable(f"{self.url}{path} answers more than {MOST_BYTES:,} bytes")
        return body


def decoded(body: bytes) -> ClusterStatus:
    """Raises Unavailable if it is no ClusterStatus."""
    try:
        return msgspec.json.decode(body, type=ClusterStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise Unavailable(f"/status is not what this release understands: {e}") from e


def _refusal(what: str, status: int, body: bytes) -> DistServeError:
    try:
        said = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        said = "no reason given"
    text = f"{what} answers {status}: {said}"
    if status == 401:
        return Unauthorized(f"{text} (the key is read from ${KEY_VARIABLE})")
    return Forbidden(text) if status == 403 else Unavailable(text)
