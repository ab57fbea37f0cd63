"""DistServe's decode service."""
