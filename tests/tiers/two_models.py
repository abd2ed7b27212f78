"""Two models on one place: same layout, same prompts, another fingerprint; a node for each."""

from collections.abc import Callable
from dataclasses import replace

from kvtide.core.records import Record
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome

LAYOUT = layout_of(4096, 8192)
ONE, OTHER = root_of("a model"), root_of("another model")
PROMPT = text(1, 10)


def check_apart(
    here: DrivenTier,
    there: DrivenTier,
    look: Callable[[DrivenTier], None],
    damage: Callable[[DrivenTier, Record], None],
) -> None:
    """Neither finds nor harms what the other's engines have stored.

    Args:
        here, there: the nodes, both on an empty place.
        look: lets one learn what the other has done.
        damage: changes a byte of a record that a node has stored.
    """
    mine, theirs = chain_of(ONE, LAYOUT, PROMPT), chain_of(OTHER, LAYOUT, PROMPT)
    here.keep(mine)
    there.keep(theirs)
    check_all(here, mine, look)
    check_all(there, theirs, look)
    for node, own, foreign in ((here, ONE, theirs), (there, OTHER, mine)):
        asked = node.ask(foreign[:2], foreign[2].digests, root=own, parent=own.key)
        assert node.found(asked).records == []
        asked = node.ask(foreign[:2], foreign[2].digests, root=own, parent=foreign[0].parent)
        assert node.found(asked).records == []
        named_as_own = {node.load(replace(record, root=own)) for record in foreign}
        assert named_as_own == {LoadOutcome.ABSENT}
        assert node.tier.statistics().state == "on"
    damage(here, mine[0])
    assert here.load(mine[0]) is LoadOutcome.CORRUPT
    assert here.find(mine[:2]) == []
    check_all(there, theirs, look)
    here.keep(mine)
    assert here.tier.clear(None, ONE.fingerprint) == len(mine)
    assert here.find(mine[:2]) == []
    check_all(there, theirs, look)


def check_all(node: DrivenTier, chain: list[Record], look: Callable[[DrivenTier], None]) -> None:
    """It finds all of a chain, and each byte of it."""
    look(node)
    assert node.find(chain[:2], chain[2].digests) == chain
    assert {node.load(record) for record in chain} == {LoadOutcome.LOADED}
