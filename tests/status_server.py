"""A real HTTP server that answers as a gateway's GET /status and /metrics/cluster do, with what a test gives it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import sin

import msgspec

from distserve.status import (
    ClassStatus,
    ClusterStatus,
    FlowStatus,
    GatewayStatus,
    Quantiles,
    Second,
    ServiceStatus,
    TierStatus,
    Trouble,
    Warning,
)

METRICS = """\
# HELP distserve_worker_running_sequences Sequences that are being computed.
# TYPE distserve_worker_running_sequences gauge
distserve_worker_running_sequences{role="decode",model="tiny",worker="decode-0"} 3.0
distserve_worker_running_sequences{role="decode",model="tiny",worker="decode-1"} 4.0
distserve_gateway_live_sequences{model="tiny"} 7.0
distserve_odd{text="a \\"b\\" \\\\ {c}, d=\\n"} 1.5e+06 1764500000000
distserve_not_there NaN
"""


def busy_status(num_decode: int = 2, *, at_unix_s: float | None = None) -> ClusterStatus:
    """A cluster with something in every field. In the last second of its history 412 tokens came."""
    now = time.time() if at_unix_s is None else at_unix_s

    def quantiles(p50: float) -> Quantiles:
        return Quantiles(count=212, p50=p50, p90=1.9 * p50, p99=3.3 * p50)

    gateway = GatewayStatus(
        id="gateway-0",
        status="degraded",
        reasons=["prefill worker prefill-1: rdma cannot be used here: no device"],
        uptime_s=8040.0,
        num_live=12,
        requests_per_s=3.42,
        tokens_per_s=412.0,
        good_requests_per_s=3.3,
        ttft=quantiles(0.0412),
        itl=quantiles(0.0083),
        tpot=quantiles(0.0091),
        e2e=quantiles(1.8),
        queue=quantiles(0.002),
        prefill=quantiles(0.031),
        transfer=quantiles(0.0009),
        decode=quantiles(1.7),
        classes={
            "normal": ClassStatus(num_requests=190, num_promised=180, num_attained=178, num_refused=3),
            "batch": ClassStatus(num_requests=22),
        },
        routes_per_s={"pair": 3.1, "local": 0.3},
        breaker="closed",
        bus_reconnects=1,
    )
    services = [
        ServiceStatus(id="gateway-0", role="gateway", status="degraded", num_running=12, tokens_per_s=412.0),
        ServiceStatus(
            id="prefill-0",
            role="prefill",
            status="ok",
            num_running=1,
            num_waiting=2,
            num_waiting_tokens=900,
            free_blocks=3000,
            tokens_per_s=2100.0,
            kv_hit_rate=0.42,
            mean_batch=1.7,
            transports_in_use=["shm"],
            total_blocks=4096,
            cached_blocks=900,
        ),
        ServiceStatus(
            id="prefill-1",
            role="prefill",
            status="degraded",
            reasons=["rdma cannot be used here: no device"],
            free_blocks=4096,
            total_blocks=4096,
            cached_blocks=900,
        ),
        *(
            ServiceStatus(
                id=f"decode-{i}",
                role="decode",
                status="ok",
                num_running=3 + i,
                free_blocks=2000,
                tokens_per_s=206.0,
                step_s=0.0081,
                mean_batch=3.5,
                transports_in_use=["shm"],
                total_blocks=4096,
                cached_blocks=900,
            )
            for i in range(num_decode)
        ),
        ServiceStatus(id="kvstore-0", role="kvstore", status="ok", reached=False),
    ]
    mib = 1 << 20
    tiers = [
        TierStatus(tier="hbm", num_blocks=2000, num_bytes=350 * mib, capacity_bytes=1400 * mib, hit_share=0.4),
        TierStatus(tier="dram", num_blocks=800, num_bytes=140 * mib, capacity_bytes=1024 * mib, read_bytes_per_s=1e6),
        TierStatus(tier="disk", num_blocks=9000, num_bytes=1580 * mib),
    ]
    flows = [
        FlowStatus(
            transport="shm", traffic_class="prefill", dscp=10, num_bytes=8 << 30, bytes_per_s=9e7, leases_per_s=3.1
        ),
        FlowStatus(transport="tcp", traffic_class="background", dscp=8, num_bytes=2 << 30, retransmitted_share=0.002),
    ]
    history = [
        Second(
            at_unix_s=now - 119 + i,
            num_tokens=412 if i == 119 else int(400 + 200 * sin(i / 9)),
            num_live=12,
            num_first_tokens=4,
            ttft_p99_s=None if i % 11 == 0 else 0.05 + 0.04 * sin(i) ** 2,
            itl_p99_s=0.01 + 0.01 * sin(i / 3) ** 2,
        )
        for i in range(120)
    ]
    return ClusterStatus(
        at_unix_s=now,
        interval_s=1.0,
        model="tiny",
        version="1.2.3",
        gateway=gateway,
        services=services,
        tiers=tiers,
        flows=flows,
        history=history,
        troubles=[
            Trouble(
                at_unix_s=now - 75, service="decode-7", code="worker_lost", message="decode-7 left\x1b[31m, unasked"
            )
        ],
        warnings=[Warning(rule="add_decode", message="Decode steps take too long: add decode workers.")],
    )


class StatusServer:
    """What it answers may be changed at any time; `delay_s` is before each answer, `key` what it asks for."""

    def __init__(self) -> None:
        self.body = msgspec.json.encode(busy_status())
        self.metrics = METRICS
        self.code = 200
        self.key = ""
        self.delay_s = 0.0
        self.num_asked = 0
        server = self

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.num_asked += 1
                if server.delay_s:
                    time.sleep(server.delay_s)
                body, code = server.body, server.code
                if self.path == "/metrics/cluster":
                    body = server.metrics.encode()
                elif self.path != "/status":
                    code = 404
                if server.key and self.headers.get("authorization") != f"Bearer {server.key}":
                    code, body = 401, b'{"error":{"message":"no such key","code":"invalid_api_key"}}'
                try:
                    self.send_response(code)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # who asked has left
                    pass

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._answering = Answering
        self._http: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def show(self, status: ClusterStatus) -> None:
        self.body = msgspec.json.encode(status)

    def start(self) -> None:
        """Again on the same port, after a stop."""
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), self._answering)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None


@contextmanager
def status_server() -> Iterator[StatusServer]:
    server = StatusServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
