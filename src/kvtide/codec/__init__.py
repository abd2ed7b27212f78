"""The byte formats of what rests below the host or travels between machines."""
