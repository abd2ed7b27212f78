"""Assembles: the process that keeps every byte outside the engines."""
