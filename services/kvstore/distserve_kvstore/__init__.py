"""The KV store: blocks by content, over memory, disk and an object store, shared by every worker."""
