"""The tier in a directory that several machines mount."""
