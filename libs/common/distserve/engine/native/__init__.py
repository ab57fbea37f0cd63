"""Forward passes in compiled code, for CPUs.

A model's own Python code spends most of a small pass outside of arithmetic: thirty layers of some twenty calls each,
matrix products made for many rows, KV copied together for attention. `source/` holds the same pass for models of the
Llama family as C++ of its own, without torch's headers: it compiles in seconds, once, in the background (build.py),
reads the model's weights where they are, and serves once it agreed with the model's own code on this very machine
(loader.py). Without a compiler, for another kind of model or off the CPU, all runs as before.
"""
