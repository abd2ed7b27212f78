"""Requests of a toy engine, and the KV blocks that they own."""

import enum
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class Adapter:
    """As vLLM's LoRARequest, as far as it is looked at."""

    lora_int_id: int
    lora_path: str


class ToyRequest:
    """One request, with the attributes of vLLM's that are read."""

    prompt_embeds = None
    resumable = False
    kv_transfer_params = None
    mm_features = ()

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
        weights: int = 0,
        skips_reading: bool = False,
    ) -> None:
        self.request_id = number
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.cache_salt = salt
        self.lora_request = adapter
        self.priority = priority
        self.weights = weights
        """What its KV is computed with: the engine's weights and the adapter's."""
        self.skip_reading_prefix_cache = skips_reading
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_stale_tokens = 0
        self.num_preemptions = 0
        self.status = Status.WAITING
        self.is_load_over = False
        self.has_load_failed = False
        self.blocks: list[int] = []
        self.local_blocks = 0
        """Of these, what the engine's own cache had when it was admitted."""
        self.was_scheduled = False
        self.external_tokens = 0
        self.is_doubtful = False
        """It may go by the name of an adapter that is not there any more."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt's and those that were generated."""
        return len(self.all_token_ids)

    @property
    def adapter_path(self) -> str:
        """Where its adapter lies; empty where it has none."""
        return self.lora_request.lora_path if self.lora_request else ""

    @property
    def has_old_bytes(self) -> bool:
        """Whether it counts on bytes that were computed, or have been loaded, before now."""
        is_loading = self.status is Status.LOADING and not self.is_load_over
        return bool(self.blocks) and not (is_loading and not self.local_blocks)

    @property
    def generated(self) -> list[int]:
        """What it has generated so far."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first, where priorities count."""
        return (self.priority, self.request_id)


class Blocks:
    """The engine's KV blocks: owned, or free and maybe still holding a cached prefix."""

    def __init__(self, block_count: int, block_tokens: int, *, is_cached: bool) -> None:
        self.block_tokens = block_tokens
        self.block_count = block_count
        self._is_cached = is_cached
        self._free: OrderedDict[int, None] = OrderedDict((n, None) for n in range(block_count))
        self._owners = [0] * block_count
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free_count(self) -> int:
        """Blocks that can be given out."""
        return len(self._free)

    def names(self, request: ToyRequest, count: int) -> list[bytes]:
        """What the first blocks of a request are called in this engine's own cache."""
        running = hashlib.blake2b(digest_size=16)
        running.update(f"{request.cache_salt} {request.weights}".encode())
        found, size = [], self.block_tokens
        for block in range(count):
            running.update(struct.pack(f"{size}I", *request.all_token_ids[block * size :][:size]))
            found.append(running.digest())
        return found

    def cached_prefix(self, request: ToyRequest) -> list[int]:
        """The blocks of a request that this engine's own cache has; one token is left over."""
        if not self._is_cached or request.skip_reading_prefix_cache:
            return []
        found = []
        for name in self.names(request, (request.num_tokens - 1) // self.block_tokens):
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def cache(self, request: ToyRequest, token_count: int) -> None:
        """Its first tokens are, or will be at the end of this step, in its blocks."""
        if not self._is_cached:
            return
        count = min(token_count, request.num_tokens) // self.block_tokens
        for block, name in zip(request.blocks, self.names(request, count), strict=False):
            if block not in self._names and name not in self._by_name:
                self._names[block] = name
                self._by_name[name] = block

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of these are free as yet."""
        return sum(block in self._free for block in blocks)

    def own(self, blocks: Iterable[int]) -> None:
        """One more request has these."""
        for block in blocks:
            self._owners[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Free blocks, those first that were freed longest ago; what they cached is gone."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        self.evict(taken)
        return taken

    def let_go(self, blocks: Sequence[int]) -> None:
        """One request has these no more."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            assert self._owners[block] >= 0, block
            if not self._owners[block]:
                self._free[block] = None

    def evict(self, blocks: Iterable[int]) -> None:
        """What these hold is not found any more; whoever has them keeps them."""
        for block in blocks:
            name = self._names.pop(block, None)
            if name is not None:
                del self._by_name[name]

    def forget(self) -> None:
        """Nothing that is cached is found any more."""
        self.evict(range(self.block_count))
