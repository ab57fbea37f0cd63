"""Attention over the paged cache: one function that models call (hook.py), one backend a file behind it."""

from __future__ import annotations

from distserve.engine.attention.base import AttentionBackend, AttentionPlan
from distserve.errors import ConfigError

__all__ = ["BACKENDS", "AttentionBackend", "AttentionPlan", "attention_backend"]

BACKENDS = ("sdpa",)


def attention_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises ConfigError that lists the names there are."""
    if name == "sdpa":
        from distserve.engine.attention.sdpa import SdpaBackend

        return SdpaBackend()
    expected = ", ".join(BACKENDS)
    raise ConfigError(
        f"attention is {name!r}, must be one of {expected}", key="attention", value=name, expected=expected
    )
