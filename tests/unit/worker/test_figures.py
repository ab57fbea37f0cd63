"""What a worker has measured, as Prometheus reads it."""

from prometheus_client.metrics_core import Metric

from distserve.errors import DeadlineExceeded, PeerLost
from distserve.kv.block_pool import BlockPool
from distserve.worker.figures import WorkerFigures


def samples(families: tuple[Metric, ...]) -> dict[tuple[str, ...], float]:
    """(name without its prefix, values of its own labels) -> value."""
    found: dict[tuple[str, ...], float] = {}
    for sample in (s for family in families for s in family.samples):
        assert (sample.labels["role"], sample.labels["model"]) == ("decode", "tiny")
        own = [value for name, value in sample.labels.items() if name not in ("role", "model")]
        found[sample.name.removeprefix("distserve_worker_"), *own] = sample.value
    return found


def test_blocks_are_free_cached_or_used() -> None:
    pool = BlockPool(11)
    figures = WorkerFigures("decode", "tiny", pool)

    def by_state() -> tuple[float, float, float]:
        found = samples(figures.families())
        return found["blocks", "free"], found["blocks", "cached"], found["blocks", "used"]

    assert by_state() == (10, 0, 0)
    ids = pool.allocate(4)
    pool.name(ids[:3], [b"a", b"b", b"c"])
    assert by_state() == (6, 0, 4)
    pool.free(ids)
    assert by_state() == (7, 3, 0)


def test_passes_are_told_by_phase() -> None:
    figures = WorkerFigures("decode", "tiny", BlockPool(3))
    figures.steps.note(0.004, num_sequences=8, num_tokens=8)
    figures.steps.note(0.03, num_sequences=9, num_tokens=9)
    figures.prompts.note(2.0, num_sequences=3, num_tokens=700)
    found = samples(figures.families())
    assert found["pass_seconds_count", "decode"] == 2
    assert found["pass_seconds_bucket", "decode", "0.005"] == 1
    assert found["pass_seconds_sum", "prefill"] == 2.0
    assert found["batch_sequences_bucket", "decode", "8.0"] == 1
    assert found["batch_sequences_bucket", "decode", "16.0"] == 2
    assert found["batch_tokens_sum", "prefill"] == 700
    assert found["batch_tokens_count", "decode"] == 2


def test_where_the_time_of_sequences_went() -> None:
    figures = WorkerFigures("decode", "tiny", BlockPool(3))
    figures.queue.observe(0.5)
    figures.prefill.observe(0.25)
    figures.decode.observe(8.0)
    figures.handed_over("tcp", 0.01)
    figures.handed_over("shm", 0.02)
    figures.handed_over("shm", 0.03)
    found = samples(figures.families())
    assert [found[f"{name}_seconds_sum",] for name in ("queue", "prefill", "decode")] == [0.5, 0.25, 8.0]
    assert (found["handoff_seconds_count", "tcp"], found["handoff_seconds_count", "shm"]) == (1, 2)


def test_ends_are_counted_by_outcome_and_errors_by_code() -> None:
    figures = WorkerFigures("decode", "tiny", BlockPool(3))
    figures.ended("finished")
    figures.ended("error", DeadlineExceeded("late"))
    figures.fault(PeerLost("gone"))
    figures.fault(PeerLost("gone again"))
    found = samples(figures.families())
    ends = {key[1]: value for key, value in found.items() if key[0] == "sequences_total"}
    assert ends == {"finished": 1, "handed_over": 0, "cancelled": 0, "error": 1}
    faults = {key[1]: value for key, value in found.items() if key[0] == "faults_total"}
    assert faults == {DeadlineExceeded.code: 1, PeerLost.code: 2}
