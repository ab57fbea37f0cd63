"""What prefill and decode workers share: the outbox of tokens, membership in the registry, the engine's thread."""
