"""Two hosts with RoCE v2 on any Linux machine: Soft-RoCE (the kernel's rdma_rxe) in two small QEMU guests."""
