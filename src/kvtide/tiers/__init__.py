"""Places below the host: what does not fit in memory, and what must survive it."""
