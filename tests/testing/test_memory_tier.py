"""The reference tier keeps every promise that the suite asks of others."""

from tests.testing.memory_place import MemoryTierTests


class TestMemoryTier(MemoryTierTests):
    """As it is."""
