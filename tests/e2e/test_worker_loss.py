"""What dies takes only its own streams with it, in time, and what stays serves the next."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


class Stream(threading.Thread):
    """A streaming client on a thread of its own, that notes when its end came."""

    def __init__(self, url: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.body = {"model": "tiny", "prompt": [9] * 40, "stream": True, "ignore_eos": True, "temperature": 0}
        self.body |= {"stream_options": {"include_usage": True}, **more}
        self.num_events = 0
        self.num_tokens = 0  # as the usage at the end says
        self.error: dict[str, Any] | None = None
        self.done = False
        self.ended_at = 0.0
        self.status = 0
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + "/v1/completions", json=self.body, timeout=60) as response:
                self.status = response.status_code
                if self.status != 200:  # it failed before its first token
                    self.error = json.loads(response.read())["error"]
                    return
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        self.error = event.get("error", self.error)
                        self.num_events += bool(event.get("choices"))
                        self.num_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        finally:
            self.ended_at = time.monotonic()


def answers(c: Cluster) -> bool:
    status, _ = c.post("/v1/completions", {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4})
    return status == 200


def test_a_decode_worker_killed_in_mid_answer(tiny_llama: Path, tmp_path: Path) -> None:
    with Cluster(tiny_llama, tmp_path, decode=[{}, {}]) as c:
        streams = [Stream(c.url, max_tokens=800) for _ in range(8)]
        wait_until(lambda: all(s.num_events > 3 for s in streams), 30, "all streams flow")
        c["decode-0"].kill()
        killed_at = time.monotonic()
        assert answers(c), "new requests are served by the rest at once"
        for s in streams:
            s.join(60)
        lost = [s for s in streams if s.error]
        assert 1 <= len(lost) < len(streams), "both workers had some"
        for s in lost:
            assert s.error is not None
            assert s.error["code"] == "worker_lost"
            assert s.ended_at - killed_at < 3.0
        for s in streams:
            assert s.done == (s.error is None)
            assert s.error or s.num_tokens == 800
        c.wait_until_idle()


def test_a_prefill_worker_killed_with_prompts_in_its_queue(tiny_llama: Path, tmp_path: Path) -> None:
    slow = {"prefill.chunk_tokens": 16, "prefill.max_batch_tokens": 16}  # a prompt at a time, in a hundred passes
    with Cluster(tiny_llama, tmp_path, prefill=[slow, slow], settings={"bus.beat_s": 0.2}) as c:
        streams = [Stream(c.url, max_tokens=8, prompt=[9] * 1600) for _ in range(16)]
        wait_until(
            lambda: all(c.registry()[f"prefill-{i}"].load.num_waiting >= 4 for i in range(2)), 30, "both have queues"
        )
        c["prefill-0"].freeze()  # with one prompt half computed, and others accepted behind it
        num_before = sum(s.done for s in streams)
        c["prefill-0"].kill()
        killed_at = time.monotonic()
        assert answers(c), "new requests are served by the other one at once"
        for s in streams:
            s.join(60)
        lost = [s for s in streams if s.error]
        assert len(lost) >= 2, "the prompt in progress and those that waited"
        assert len(streams) - len(lost) > num_before, "the other worker's queue is computed to its end"
        for s in lost:
            assert s.error is not None
            assert s.error["code"] == "worker_lost"
            assert s.ended_at - killed_at < 3.0
        for s in streams:
            assert s.done == (s.error is None)
            assert s.error or s.num_tokens == 8
        c.wait_until_idle()


def test_a_frozen_decode_worker_is_given_up(tiny_llama: Path, tmp_path: Path) -> None:
    with Cluster(tiny_llama, tmp_path, decode=[{}, {}]) as c:
        streams = [Stream(c.url, max_tokens=800) for _ in range(4)]
        wait_until(lambda: all(s.num_events > 3 for s in streams), 30, "all streams flow")
        c["decode-1"].freeze()
        frozen_at = time.monotonic()
        for s in streams:
            s.join(60)
        lost = [s for s in streams if s.error]
        assert lost
        for s in lost:
            assert s.ended_at - frozen_at < 5.0
        assert answers(c)
        c["decode-1"].thaw()
        c.wait_for_workers({"decode-1"}, 20)
        c.wait_until_idle()


def test_a_worker_asked_to_leave_finishes_first(tiny_llama: Path, tmp_path: Path) -> None:
    with Cluster(tiny_llama, tmp_path, decode=[{}, {}], prefill=[{}, {}], settings={"decode.drain_s": 60}) as c:
        streams = [Stream(c.url, max_tokens=600) for _ in range(6)]
        wait_until(lambda: all(s.num_events > 3 for s in streams), 30, "all streams flow")
        assert c["decode-0"].terminate(60) == 0
        assert c["prefill-1"].terminate(60) == 0
        for s in streams:
            s.join(60)
            assert s.done
            assert s.error is None
        assert answers(c)


def test_no_worker_of_a_role_is_503_and_names_it(tiny_llama: Path, tmp_path: Path) -> None:
    with Cluster(tiny_llama, tmp_path) as c:
        c["decode-0"].terminate()
        status, body = c.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})
        assert (status, body["error"]["code"]) == (503, "no_worker")
        assert "decode" in body["error"]["message"]
        c.start("decode", "decode-9")
        c.wait_for_workers({"decode-9"})
        assert answers(c)


def test_a_client_that_leaves_frees_everything_within_a_second(tiny_llama: Path, tmp_path: Path) -> None:
    with Cluster(tiny_llama, tmp_path) as c:
        body = {"model": "tiny", "prompt": [9] * 40, "stream": True, "ignore_eos": True, "max_tokens": 1900}
        with httpx.stream("POST", c.url + "/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            wait_until(lambda: c.registry()["decode-0"].load.num_running == 1, 10, "it runs")
        c.wait_until_idle(3.0)  # within 1 s, and a heartbeat that says so
