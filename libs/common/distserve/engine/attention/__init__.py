"""Attention over the paged cache: one function that models call (hook.py), one backend a file behind it."""

from __future__ import annotations

from importlib.util import find_spec

from distserve.engine.attention.base import AttentionBackend, AttentionPlan
from distserve.errors import ConfigError
from distserve.messages import KVLayout

__all__ = ["BACKENDS", "AttentionBackend", "AttentionPlan", "attention_backend"]

BACKENDS = ("sdpa", "triton")


def attention_backend(name: str, layout: KVLayout, device: str) -> AttentionBackend:
    """The backend of that name; "auto": the best there is for a pool of this layout on this device. Raises ConfigError
    that says what would do."""
    if name == "auto":
        name = "sdpa" if _why_not_triton(layout, device) else "triton"
    if name == "sdpa":
        from distserve.engine.attention.sdpa import SdpaBackend

        return SdpaBackend()
    if name == "triton" and (why := _why_not_triton(layout, device)):
        raise ConfigError(
            f"model.attention is 'triton', but {why}: take auto or sdpa",
            key="model.attention",
            value=name,
            expected="auto or sdpa",
        )
    if name == "triton":
        from distserve.engine.attention.triton import TritonBackend

        return TritonBackend()
    expected = ", ".join(("auto", *BACKENDS))
    raise ConfigError(
        f"model.attention is {name!r}, must be one of {expected}", key="model.attention", value=name, expected=expected
    )


def _why_not_triton(layout: KVLayout, device: str) -> str:
    """Empty if it can be used."""
    if not device.startswith("cuda"):
        return f"the device is {device}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    from distserve.engine.attention.kernels import can_serve

    if not can_serve(layout.head_dim, layout.block_size):
        return f"heads of {layout.head_dim} numbers in blocks of {layout.block_size} tokens are not powers of two"
    return ""
