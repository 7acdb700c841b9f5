"""The GPU path: attention kernels in Triton, persistent device buffers, decode steps captured as CUDA graphs."""
