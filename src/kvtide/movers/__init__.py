"""Copies in the worker: between the engine's paged KV memory and cells of mapped regions."""
