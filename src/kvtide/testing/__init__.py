"""Shipped for those who add a tier, a mover or an engine: suites, models, fakes."""
