"""A null engine: the prefill and decode services as they are, around a model that computes nothing.

    python -m benchmarks.null_engine prefill --set bus.url=nats://127.0.0.1:4222 --set model.path=FOLDER …

Real: the process and its event loop, scheduler, block pool, reservations and leases, outbox, every message on the
bus, registry and side door. Replaced: the forward pass (`engine`), which gives one token a sequence a step, the thread
that it runs on (--engine-thread keeps it), and the transport (`kv`), which sends the state that ends a hand-over over
the bus, and no KV. So the control plane is measured, and nothing else.
"""
