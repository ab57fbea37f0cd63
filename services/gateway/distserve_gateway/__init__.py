"""DistServe's gateway service."""
