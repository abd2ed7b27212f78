"""The model of the node's memory (node_model.py) above two tiers, slow, forgetful and unsure.

They answer when a rule says so, in any order, and well or not. The model adds to what it says:

- cells that a tier writes or reads are lent to nobody else until it has answered;
- what a tier gives back is what was stored there, and is matched under the same laws.
"""

from typing import TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtide.core import messages as m
from kvtide.core.effects import AskTier, HostLimit, LoadFrom, StoreTo
from kvtide.core.reasons import EvictCause
from tests.core.actor import Content
from tests.core.fake_tier import FakeTier
from tests.core.node_model import HOST_BYTES, NodeModel, pick
from tests.core.world import World

Job: TypeAlias = AskTier | LoadFrom | StoreTo


class TieredNodeModel(NodeModel):
    """One node above two tiers: what the first has lost the second may have."""

    lately = 40  # more than the host holds

    def make_world(self) -> World:
        self.tiers = [FakeTier(), FakeTier()]
        for tier in self.tiers:
            tier.answers = False
        self.payloads: dict[tuple[int, bytes], list[list[Content]]] = {}
        """For each record of each tier, its blocks, shard by shard."""
        self.promoted = [0, 0]
        return World(HOST_BYTES, tiers=self.tiers)

    @rule(which=pick, fate=st.sampled_from(["good", "good", "good", "bad"]))
    def tier_answers(self, which: int, fate: str) -> None:
        """One job of a tier ends."""
        if waiting := self.waiting():
            self.answer(waiting[which % len(waiting)], is_good=fate == "good")

    @rule()
    def tier_answers_all(self) -> None:
        """Everything that waits for tiers ends well, and what follows from that."""
        while waiting := self.waiting():
            self.answer(waiting[0], is_good=True)

    @rule()
    def host_forgets(self) -> None:
        """All that is not used goes; the tiers have it still."""
        self.world.give(HostLimit(0))
        for _ in range(4):
            self.world.tick()
        self.world.give(HostLimit(HOST_BYTES))
        self.settle()

    @rule(which=pick, back=pick, is_cleared=st.booleans())
    def look_behind(self, which: int, back: int, is_cleared: bool) -> None:
        """The end of a chain goes for room, and is asked for by its blocks; what a tier has of it
        comes, and by then the chain may be cleared."""
        actor = self.serving(which)
        if actor is None or not self.offered[actor.fingerprint]:
            return
        tokens, salt = self.offered[actor.fingerprint][-1 - back % self.lately :][0]
        root = self.root(actor, salt)
        keys, digests = actor.chain(tokens, root)
        end = self.world.machine.index.entries.get(keys[-1])
        if end is not None and end.is_evictable:
            self.world.machine.lending.evict(end, EvictCause.ROOM)
            first_chunk = len(keys) - 1
            actor.number += 1
            actor.asked[actor.number] = (root, tokens, first_chunk)
            parent = [root, *keys][first_chunk]
            actor.say(m.Probe(actor.number, root, parent, digests[first_chunk]))
            self.settle()
            while asked := [job for job in self.waiting() if isinstance(job, AskTier)]:
                self.answer(asked[0], is_good=True)
            if is_cleared:
                self.clear(salt, is_all=False)

    @rule(which=pick)
    def tier_forgets(self, which: int) -> None:
        """A record that has no children is evicted there."""
        tier = self.tiers[which % len(self.tiers)]
        parents = {record.parent for record in tier.records.values()}
        leaves = [key for key in tier.records if key not in parents]
        if leaves:
            del tier.records[leaves[which % len(leaves)]]

    def waiting(self) -> list[Job]:
        return [job for tier in self.tiers for job in tier.waiting]

    def answer(self, job: Job, *, is_good: bool) -> None:
        tier = self.tiers[job.tier]
        tier.waiting.remove(job)
        tier.loads_fail = not is_good
        tier.stores_as = "stored" if is_good else "failed"
        event = tier.answer(job)
        if isinstance(job, StoreTo) and event.is_ok:
            self.payloads[job.tier, job.record.key] = self.read(job)
        elif isinstance(job, LoadFrom):
            self.promoted[job.tier] += event.is_ok
            self.fill(job, is_good=event.is_ok)
        self.world.give(event)
        self.settle()

    def read(self, job: StoreTo) -> list[list[Content]]:
        """What the tier reads from the cells: still that which was there when it was asked."""
        run = job.run
        shards = []
        for shard in range(job.record.layout.shard_count):
            cells = range(run.first_cell, run.end_cell)
            written = [self.memory[run.region, cell, shard] for cell in cells]
            generations = {found for found, _ in written}
            assert generations == {run.generation}, "changed under the tier's eyes"
            shards.append([content for _, content in written])
        return shards

    def fill(self, job: LoadFrom, *, is_good: bool) -> None:
        """What the tier writes into the cells: a failed load spoils them."""
        run = job.run
        cells = range(run.first_cell, run.end_cell)
        for cell in cells:
            found = self.world.generations[run.region, cell]
            assert found == run.generation, "lent to somebody else"
        for shard in range(job.record.layout.shard_count):
            for block, cell in enumerate(cells):
                spoilt: Content = (job.record.root.key, ())
                payload = self.payloads[job.tier, job.record.key]
                content = payload[shard][block] if is_good else spoilt
                self.memory[run.region, cell, shard] = (run.generation, content)

    def teardown(self) -> None:
        """The tiers let go too."""
        self.tier_answers_all()
        for actor in list(self.actors.values()):
            self.kill_scheduler(actor)
        self.tier_answers_all()
        super().teardown()
