"""The engine: transformers' model code over our own paged KV cache. torch is imported only below here."""
