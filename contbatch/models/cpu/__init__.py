"""The fast path on a CPU: a few operations in C++ (`kernels.cpp`), built on first use, and the model that calls them.

`native.py` finds a compiler, builds and loads; `packing.py` puts weights into the order in which they are read;
`decoder.py` runs a step. The plain model and attention of `contbatch.models` are the reference that all of it is
tested against.
"""
