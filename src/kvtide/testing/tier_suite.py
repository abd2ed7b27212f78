"""The promises of a tier as tests: subclass `TierTests`, say how one is made, and run pytest.

    class TestDiskTier(TierTests):
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

from kvtide.testing.tier_limits import LimitTests
from kvtide.testing.tier_promises import PromiseTests


class TierTests(PromiseTests, LimitTests):
    """What every tier promises."""
