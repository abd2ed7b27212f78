"""Chunks on the machine's own drives: bounded, verified, found again after any end."""
