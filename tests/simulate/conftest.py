"""vLLM is imported before any test module is: what it warns of is not ours to end."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kvtide.testing.simulate.world  # noqa: F401
