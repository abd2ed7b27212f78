"""What messages carry, whoever makes them."""

import dataclasses
from typing import get_args

from kvtide.core import messages as m


def test_whatever_names_a_key_names_its_root() -> None:
    """A key alone would be found by whoever can guess it; a root is made of salt and adapter."""
    naming = {"keys", "parent", "digests"}
    found = []
    for message in get_args(m.Message):
        fields = {one.name for one in dataclasses.fields(message)}
        if fields & naming:
            assert "root" in fields, message
            found.append(message)
    assert found == [m.Lookup, m.Probe, m.StoreOffer]
