"""A gateway's exposition as samples, for tests."""

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.gateway.scripted import Cluster


def samples(text: str) -> dict[str, float]:
    """`name{label=value,…}` without the model and without buckets -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model", "model_name"))
            if not sample.name.endswith("_bucket"):
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def measured(cluster: Cluster) -> dict[str, float]:
    return samples(cluster.gateway.metrics.exposition().decode())
