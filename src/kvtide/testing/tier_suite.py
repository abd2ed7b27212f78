"""The promises of a tier as tests: subclass `TierTests`, say how one is made, and run pytest.

    class TestDiskTier(TierTests):
        tier_type = DiskTier

        def make_tier(self, tmp_path, *, bytes_max):
            return DiskTier(tmp_path / "kv", bytes_max, self.wake, ...)

        def reopen(self, tier):
            return DiskTier(tier.path, tier.bytes_max, self.wake, ...)

Time stands still but for `tick`; tests wait for `wake` alone. What disturbs a tier's place is the
subclass's to say (`stalled`, `failing`, `damage` of `TierPlace`), and what does not apply to it is
named, with a reason, in `narrowed`. The driver watches with every job that it ends once, that its
cells are left alone from then on, and that a load which ended well brought each byte; with every
poll, that the cap holds.
"""

import importlib
import pkgutil
from types import ModuleType

from kvtide import tiers
from kvtide.testing.tier_limits import LimitTests
from kvtide.testing.tier_promises import PromiseTests
from kvtide.tiers.base import Tier

_CALLS = {name for name, value in vars(Tier).items() if callable(value) and name[0] != "_"}


class TierTests(PromiseTests, LimitTests):
    """What every tier promises."""


def tiers_without_tests(package: ModuleType = tiers) -> list[str]:
    """Tiers of a package and those below that no subclass of `TierTests` is for, by full name;
    assert that there are none, where all such subclasses have been imported.

    A subclass counts if pytest collects it: by its name.
    """
    suites = [suite for suite in _subclasses(TierTests) if suite.__name__.startswith("Test")]
    tested = {getattr(suite, "tier_type", None) for suite in suites}
    missing = []
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        missing += [
            f"{module.__name__}.{name}"
            for name, value in vars(module).items()
            if _is_tier(value) and value.__module__ == module.__name__ and value not in tested
        ]
    return missing


def _is_tier(value: object) -> bool:
    return isinstance(value, type) and value is not Tier and set(dir(value)) >= _CALLS


def _subclasses(of: type) -> list[type]:
    direct: list[type] = of.__subclasses__()
    return direct + [below for one in direct for below in _subclasses(one)]
