"""Several expositions in one: valid for Prometheus, and nothing of them is lost."""

import shutil
import subprocess
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Counted
from prometheus_client.parser import text_string_to_metric_families

from distserve_gateway.merged_metrics import MergedMetrics

Sample = tuple[str, tuple[tuple[str, str], ...], float]


def exposition(seed: int, label: str = "p0") -> str:
    registry = CollectorRegistry()
    Counted("sent_bytes", "Bytes.", ["peer"], registry=registry).labels(label).inc(seed)
    Gauge("free_blocks", "Blocks.", registry=registry).set(seed)
    Histogram("pass_seconds", "Of a pass.", ["phase"], registry=registry).labels("decode").observe(seed)
    return generate_latest(registry).decode()


def merged(texts: dict[tuple[str, str], str]) -> str:
    all_of = MergedMetrics()
    for (service, role), text in texts.items():
        all_of.begin(service, role)
        lines = text.split("\n")
        all_of.add(lines[:3])  # as slices come
        all_of.add(lines[3:])
    return all_of.text()


def samples(text: str, **more: str) -> Counter[Sample]:
    return Counter(
        (s.name, tuple(sorted({**s.labels, **more}.items())), s.value)
        for family in text_string_to_metric_families(text)
        for s in family.samples
    )


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=8), max_size=4))
def test_every_sample_is_there_with_its_service_and_role(services: dict[str, str]) -> None:
    texts = {(name, "prefill"): exposition(i, label) for i, (name, label) in enumerate(services.items())}
    expected: Counter[Sample] = Counter()
    for (name, role), text in texts.items():
        expected += samples(text, service=name, service_role=role)
    assert samples(merged(texts)) == expected


def test_families_are_announced_once_and_hang_together() -> None:
    text = merged({("p0", "prefill"): exposition(1), ("d0", "decode"): exposition(2)})
    announced = Counter(line for line in text.split("\n") if line.startswith("#"))
    assert set(announced.values()) == {1}
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))


def test_a_family_of_another_type_is_left_out_of_that_service_alone() -> None:
    other = "# HELP free_blocks Blocks.\n# TYPE free_blocks counter\nfree_blocks 5\n# TYPE more gauge\nmore 1\n"
    text = merged({("p0", "prefill"): exposition(1), ("old", "prefill"): other})
    assert samples(text)[("more", (("service", "old"), ("service_role", "prefill")), 1.0)] == 1
    assert [s.labels["service"] for f in text_string_to_metric_families(text) for s in f.samples if s.value == 5] == []
    assert "# Left out: free_blocks of old is a counter there" in text


def test_what_nobody_announced_is_kept() -> None:
    text = merged({("a", "decode"): 'bare 1\nbare2{x="y"} 2\nbare3{} 3\n', ("b", "decode"): "bare 4\n"})
    assert len(samples(text)) == 4
    assert 'bare3{service="a",service_role="decode"} 3' in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_promtool_takes_it() -> None:
    text = merged({("p0", "prefill"): exposition(1), ("d0", "decode"): exposition(2)})
    done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=20)
    assert "error while linting" not in done.stderr, done.stderr
    assert done.returncode in (0, 3), done.stderr  # 3: its taste of names
