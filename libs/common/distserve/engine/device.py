"""What a device has left."""

import torch


def free_bytes(device: str) -> int:
    """Memory of a CUDA device that is free now; what torch holds and doesn't use counts as taken."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0])
