"""How KV blocks move from a prefill worker's pool into a decode worker's. One contract (base.py), several kinds."""
