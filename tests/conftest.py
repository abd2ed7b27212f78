"""How Hypothesis looks for examples: long by itself, shortly in `scripts/check`.

Without deadlines, since a busy machine is no fault of the code.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "house", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("house"), max_examples=25)
settings.load_profile("house")
