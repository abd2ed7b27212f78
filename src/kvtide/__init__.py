"""kvtide: a KV-cache store for inference engines."""

__version__ = "0.1.0"
