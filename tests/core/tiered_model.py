"""The model of the node's memory (node_model.py) with a tier below, slow, forgetful and unsure.

It answers when a rule says so, in any order, and well or not. The model adds to what it says:

- cells that a tier writes or reads are lent to nobody else until it has answered;
- what a tier gives back is what was stored there, and is matched under the same laws.
"""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtide.core.effects import AskTier, HostLimit, LoadFrom, StoreTo
from tests.core.actor import Content
from tests.core.fake_tier import FakeTier
from tests.core.node_model import HOST_BYTES, NodeModel, pick
from tests.core.world import World


class TieredNodeModel(NodeModel):
    """One node above one tier."""

    lately = 40  # more than the host holds

    def make_world(self) -> World:
        self.tier = FakeTier()
        self.tier.answers = False
        self.payloads: dict[bytes, list[list[Content]]] = {}
        """For each record of the tier, its blocks, shard by shard."""
        self.promoted = 0
        return World(HOST_BYTES, tiers=[self.tier])

    @rule(which=pick, fate=st.sampled_from(["good", "good", "good", "bad"]))
    def tier_answers(self, which: int, fate: str) -> None:
        """One job of the tier ends."""
        waiting = self.tier.waiting
        if waiting:
            self.answer(waiting.pop(which % len(waiting)), is_good=fate == "good")

    @rule()
    def tier_answers_all(self) -> None:
        """Everything that waits for the tier ends well, and what follows from that."""
        while self.tier.waiting:
            self.answer(self.tier.waiting.pop(0), is_good=True)

    @rule()
    def host_forgets(self) -> None:
        """All that is not used goes; the tier has it still."""
        self.world.give(HostLimit(0))
        for _ in range(4):
            self.world.tick()
        self.world.give(HostLimit(HOST_BYTES))
        self.settle()

    @rule(which=pick)
    def tier_forgets(self, which: int) -> None:
        """A record that has no children is evicted there."""
        parents = {record.parent for record in self.tier.records.values()}
        leaves = [key for key in self.tier.records if key not in parents]
        if leaves:
            del self.tier.records[leaves[which % len(leaves)]]

    def answer(self, job: AskTier | LoadFrom | StoreTo, *, is_good: bool) -> None:
        tier = self.tier
        tier.loads_fail = not is_good
        tier.stores_as = "stored" if is_good else "failed"
        event = tier.answer(job)
        if isinstance(job, StoreTo) and event.is_ok:
            self.payloads[job.record.key] = self.read(job)
        elif isinstance(job, LoadFrom):
            self.promoted += event.is_ok
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
                content = self.payloads[job.record.key][shard][block] if is_good else spoilt
                self.memory[run.region, cell, shard] = (run.generation, content)

    def teardown(self) -> None:
        """The tier lets go too."""
        self.tier_answers_all()
        for actor in list(self.actors.values()):
            self.kill_scheduler(actor)
        self.tier_answers_all()
        super().teardown()
