"""The project's own schedulers in virtual time (`python -m benchmarks.sim`)."""
