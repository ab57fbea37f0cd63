"""Passes on a GPU of models that are known well enough to be computed in fewer, larger kernels than their own code."""
