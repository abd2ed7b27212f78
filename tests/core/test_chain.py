"""The keys of a growing token list are those of the whole list, whatever it grew by."""

import pytest

from kvtide.core import keys
from kvtide.core.chain import Chain, short

ROOT = bytes(32)
BLOCK, CHUNK = 4, 12
TOKENS = list(range(100, 151))


@pytest.mark.parametrize("step", [1, 3, 4, 5, 12, 13, 51])
def test_keys_do_not_depend_on_how_the_list_grew(step: int) -> None:
    whole, grown = Chain(ROOT, BLOCK, CHUNK), Chain(ROOT, BLOCK, CHUNK)
    whole.extend(TOKENS)
    for end in range(0, len(TOKENS) + step, step):
        grown.extend(TOKENS[:end])
    assert grown.keys == whole.keys
    assert len(whole.keys) == len(TOKENS) // CHUNK
    assert grown.token_count == len(TOKENS)


def test_the_last_digest_of_a_whole_chunk_is_its_key() -> None:
    chain = Chain(ROOT, BLOCK, CHUNK)
    chain.extend(TOKENS)
    for chunk, key in enumerate(chain.keys):
        assert chain.digests(chunk, chain.blocks_per_chunk)[-1] == key
        assert chain.parent(chunk + 1) == key
    assert chain.parent(0) == ROOT


def test_digests_of_a_part_are_those_of_the_whole() -> None:
    chain = Chain(ROOT, BLOCK, CHUNK)
    chain.extend(TOKENS)
    whole = chain.digests(1, 3)
    assert chain.digests(1, 2) == whole[:2]
    assert chain.short_digests(1, 2) == short(whole[:2])
    assert len(short(whole)) == 3 * keys.INNER_DIGEST_BYTES


def test_what_was_read_is_final() -> None:
    """A shorter list changes nothing: tokens are only ever appended."""
    chain = Chain(ROOT, BLOCK, CHUNK)
    chain.extend(TOKENS)
    before = list(chain.keys)
    chain.extend(TOKENS[:5])
    assert (chain.keys, chain.token_count) == (before, len(TOKENS))


@pytest.mark.parametrize("unreadable", [-1, 1 << 32, None])
def test_a_token_without_a_name_ends_the_chain(unreadable: int | None) -> None:
    """What stands before it has its names, and nothing raises in an engine's hook."""
    whole, cut = Chain(ROOT, BLOCK, CHUNK), Chain(ROOT, BLOCK, CHUNK)
    whole.extend(TOKENS)
    for _ in range(2):
        cut.extend([*TOKENS[:30], unreadable, *TOKENS[31:]])  # type: ignore[list-item]
        assert (cut.token_count, cut.keys) == (30, whole.keys[:2])
    cut.extend(TOKENS)
    assert cut.keys == whole.keys


def test_the_digest_of_one_block_is_made_once_and_grows_with_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = Chain(ROOT, BLOCK, CHUNK)
    chain.extend(TOKENS[:20])
    made: list[int] = []
    digests = Chain.digests

    def counted(self: Chain, chunk: int, blocks: int) -> list[bytes]:
        made.append(chunk)
        return digests(self, chunk, blocks)

    monkeypatch.setattr(Chain, "digests", counted)
    for _ in range(100):
        assert chain.block_digest(4) == digests(chain, 1, 2)[1]
        assert chain.block_digest(2) == chain.keys[0]
    assert made == [1, 0]
    chain.extend(TOKENS)
    for block in range(len(TOKENS) // BLOCK):
        assert chain.block_digest(block) == digests(chain, block // 3, block % 3 + 1)[-1]
