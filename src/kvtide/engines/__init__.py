"""Plugs in: one folder for each inference engine, which speaks that engine's language."""
