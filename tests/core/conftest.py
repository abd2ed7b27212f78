"""Hypothesis for these tests: no deadlines, since a busy machine is no fault of the code."""

from hypothesis import HealthCheck, settings

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
