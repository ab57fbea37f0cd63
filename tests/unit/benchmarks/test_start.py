"""Where the time of a start went, read from a log."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.start import _READY, Follower, Line, Phases, phases

LOG: list[Line] = [
    (0.5, "starting 1 gateway, 1 prefill, 1 decode …"),
    (1.5, "gateway  | 02:27:30.952 INFO     distserve_gateway.main: serving m on http://127.0.0.1:18777"),
    (5.0, "prefill-0 | 02:27:37.548 INFO     distserve.worker.boot: m: 256.6 MiB on cpu, 1 thread, loaded in 1.0 s"),
    (5.5, "decode-0 | 02:27:37.548 INFO     distserve.worker.boot: m: 256.6 MiB on cpu, 1 thread, loaded in 2.0 s"),
    (5.6, "prefill-0 | 02:27:38.008 INFO     distserve.worker.boot: warmed up in 0.5 s"),
    (6.0, "decode-0 | 02:27:38.008 INFO     distserve.worker.boot: warmed up in 0.5 s"),
    (6.1, "prefill-0 | 02:27:38.016 INFO     distserve.worker.service: ready"),
    (6.2, "decode-0 | 02:27:38.016 INFO     distserve.worker.service: ready"),
    (6.5, "ready in 6.0 s"),
]


def test_the_phases_are_those_of_the_slowest_worker_and_add_up() -> None:
    found = phases(LOG, answered_s=6.8, cpu_s=9.0)
    assert found == Phases(
        start=0.5,
        imports=pytest.approx(3.0),
        load=2.0,
        warm_up=0.5,
        register=pytest.approx(0.2),
        known=pytest.approx(0.3),
        first_answer=pytest.approx(0.3),
        total=6.8,
        gateway_serves=1.5,
        cpu=9.0,
    )
    parts = [f.name for f in fields(Phases) if f.name not in ("total", "gateway_serves", "cpu")]
    assert sum(getattr(found, name) for name in parts) == pytest.approx(found.total)


@pytest.mark.parametrize("missing", [0, 1, 8])
def test_a_line_that_never_came_is_named(missing: int) -> None:
    with pytest.raises(LookupError, match="no line of the log"):
        phases(LOG[:missing] + LOG[missing + 1 :], 7.0, 1.0)


def test_a_log_is_followed_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"starting ...\nready i")
    log = Follower(path, 0.0)
    log.read()
    assert [text for _, text in log.lines] == ["starting ..."]
    with path.open("ab") as file:
        file.write(b"n 1 s\n")
    log.wait_for(_READY, 1e9)
    assert [text for _, text in log.lines] == ["starting ...", "ready in 1 s"]
    with pytest.raises(TimeoutError, match="ready in 1 s"):
        log.wait_for(re.compile("never"), 0.0)
