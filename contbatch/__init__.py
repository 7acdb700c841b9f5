"""contbatch: continuous batching for language models, small enough to read and to teach with."""

__version__ = "0.1.0"
