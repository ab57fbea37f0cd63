"""Decode steps on a GPU as recorded launches (CUDA graphs)."""
