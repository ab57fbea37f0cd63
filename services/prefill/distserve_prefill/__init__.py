"""DistServe's prefill service."""
