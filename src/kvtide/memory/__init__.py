"""Holds: regions in memory files, their mapping and populating, and what the host can give."""
