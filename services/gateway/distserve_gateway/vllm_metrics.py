"""The gateway's figures under the names that vLLM has for them (telemetry.vllm_metric_names), for dashboards and alerts
made for it. Nothing is counted here twice: they are the same numbers, of the whole cluster where vLLM has one engine's.

https://docs.vllm.ai/en/stable/usage/metrics/ lists the names. The label is `model_name`; `engine` is left out. Bounds
of histograms are this gateway's.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric

from distserve.bus.base import RegistryEvent
from distserve.messages import WorkerInfo
from distserve_gateway.families import counter, gauge, histogram
from distserve_gateway.metrics import Metrics

Workers = Callable[[], Iterable[WorkerInfo]]  # prefill and decode workers, as the registry has them


MOST_WORKERS = 4096  # whose counts are remembered


class Preemptions:
    """Of all decode workers, since this gateway began to look. Fed by events of the registry: a worker's own count
    begins anew with each of its lives. One that was silent for a while, and expired, may come back in the same."""

    def __init__(self, workers: Iterable[WorkerInfo]) -> None:
        self.total = 0
        # By worker, the one that was heard of least lately first: the process, and what it had counted.
        self._seen = {info.worker_id: (info.pid, info.load.num_preemptions) for info in workers}

    def on_event(self, event: RegistryEvent) -> None:
        if event.info is None:
            if event.reason == "left":
                self._seen.pop(event.worker_id, None)
            return
        pid, num = event.info.pid, event.info.load.num_preemptions
        before_pid, before = self._seen.pop(event.worker_id, (pid, 0))
        # In containers each life may have the same pid: one that has counted less is another.
        self.total += num - before if pid == before_pid and num >= before else num
        self._seen[event.worker_id] = pid, num
        while len(self._seen) > MOST_WORKERS:
            del self._seen[next(iter(self._seen))]


class VllmMetrics:
    def __init__(self, metrics: Metrics, workers: Workers, preemptions: Preemptions) -> None:
        self._metrics = metrics
        self._workers = workers
        self._preemptions = preemptions
        self._model = ("model_name", metrics.model)

    def families(self) -> Iterator[Metric]:
        yield from self._histograms()
        yield from self._counters()
        yield from self._gauges()

    def _histograms(self) -> Iterator[Metric]:
        metrics, stages = self._metrics, self._metrics.stages
        for name, text, one in (
            ("time_to_first_token_seconds", "Request received to first token.", metrics.ttft),
            ("inter_token_latency_seconds", "Gap between two tokens.", metrics.itl),
            ("time_per_output_token_seconds", "Gap between two tokens, under its older name.", metrics.itl),
            ("request_time_per_output_token_seconds", "Mean time of a token after the first.", metrics.tpot),
            ("e2e_request_latency_seconds", "Request received to its end.", metrics.e2e),
            ("request_queue_time_seconds", "Time in prefill's queue.", stages["queue"]),
            ("request_prefill_time_seconds", "Time in which the prompt was computed.", stages["prefill"]),
            ("request_decode_time_seconds", "Time from the hand-over to the end.", stages["decode"]),
            ("request_prompt_tokens", "Prompt tokens of a request.", metrics.prompt_lengths),
            ("request_generation_tokens", "Output tokens of a request.", metrics.output_lengths),
        ):
            yield histogram(f"vllm:{name}", text, self._model, one)

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that were served here.", metrics.num_looked_up_tokens),
            ("generation_tokens", "Output tokens, as they come.", metrics.num_tokens),
            ("prefix_cache_queries", "Prompt tokens looked for in the KV cache.", metrics.num_looked_up_tokens),
            ("prefix_cache_hits", "Of those, the ones found there.", metrics.num_cached_tokens),
            ("num_preemptions", "Sequences that lost their blocks to others.", self._preemptions.total),
        ):
            yield counter(f"vllm:{name}", text, self._model, {(): value})
        yield counter(
            "vllm:request_success",
            "Outputs that ended, by why.",
            self._model,
            {(reason,): times for reason, times in metrics.finish_reasons.items()},
            "finished_reason",
        )

    def _gauges(self) -> Iterator[Metric]:
        loads = [(info.role, info.load) for info in self._workers()]
        num_blocks = sum(load.total_blocks for role, load in loads if role == "decode")
        num_free = sum(load.free_blocks for role, load in loads if role == "decode")
        for name, text, value in (
            (
                "num_requests_running",
                "Sequences that workers have begun.",
                sum(load.num_running for _, load in loads),
            ),
            (
                "num_requests_waiting",
                "Sequences that wait at workers. One that prefill has begun, and that waits for room at a decode "
                "worker, is among the running, too.",
                sum(load.num_waiting for _, load in loads),
            ),
            (
                "kv_cache_usage_perc",
                "Share of the decode workers' KV blocks in use: 1 is all.",
                1 - num_free / num_blocks if num_blocks else 0.0,
            ),
        ):
            yield gauge(f"vllm:{name}", text, self._model, {(): value})
