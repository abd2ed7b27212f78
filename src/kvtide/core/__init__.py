"""Decides: keys, index, slots, grants, leases. Pure: no I/O, threads, clock, environment."""
