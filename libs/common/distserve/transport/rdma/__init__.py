"""KV over RoCE v2: RDMA writes straight between two pools, through pyverbs."""
