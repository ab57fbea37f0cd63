"""What a CUDA device is, and has left."""

import torch


def free_bytes(device: str) -> int:
    """Memory of a CUDA device that is free now; what torch holds and doesn't use counts as taken."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def uuid_of(device: str) -> str:
    """By which NVIDIA's tools know a CUDA device, whatever number it has here: "GPU-…"."""
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"
