"""The bus carries metadata: requests, tokens, grants, heartbeats. Never tensors."""
