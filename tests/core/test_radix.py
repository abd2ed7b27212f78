"""The tree of children of one key, against a plain list of them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtide.core import radix
from kvtide.core.index import Entry, Root
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import KVLayout

LAYOUT = KVLayout(2, 16, (4096,))
ROOT = Root(bytes(32), bytes(32), b"", b"")


def entry_of(blocks: Sequence[int]) -> Entry:
    """An entry whose block digests are these numbers, true or not."""
    digests = b"".join(block.to_bytes(INNER_DIGEST_BYTES, "big") for block in blocks)
    return Entry(digests[-INNER_DIGEST_BYTES:] * 2, digests, ROOT, LAYOUT, 0)


def true_blocks(tokens: Sequence[int]) -> list[int]:
    """Digests as they are in truth: each stands for all tokens up to it."""
    blocks, running = [], 1
    for token in tokens:
        running = running * 4 + token
        blocks.append(running)
    return blocks


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading numbers are equal."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def tree_of(contents: Sequence[Sequence[int]]) -> tuple[radix.Tree, dict[tuple[int, ...], Entry]]:
    tree: radix.Tree = None
    entries = {}
    for content in contents:
        entries[tuple(content)] = entry_of(content)
        tree = radix.insert(tree, entries[tuple(content)])
    return tree, entries


def test_an_only_child_is_its_own_tree() -> None:
    tree, entries = tree_of([[1, 2, 3]])
    assert tree is entries[1, 2, 3]
    assert radix.remove(tree, entries[1, 2, 3]) is None


def test_children_that_part_after_two_blocks_serve_two_blocks() -> None:
    """A lookup that leaves both of them where they part gets what they share."""
    tree, _ = tree_of([[1, 2, 3, 4], [1, 2, 5]])
    found, blocks = radix.longest(tree, entry_of([1, 2, 9]).digests)
    assert found is not None
    assert blocks == 2


def test_a_tail_inside_a_longer_chunk_is_covered_by_it() -> None:
    tree, entries = tree_of([[1, 2], [1, 2, 3], [1, 7]])
    assert radix.is_covered(tree, entries[1, 2])
    assert not radix.is_covered(tree, entries[1, 2, 3])
    assert not radix.is_covered(tree, entries[1, 7])
    assert radix.endings_above(tree, entries[1, 2, 3]) == [entries[1, 2]]
    assert radix.endings_above(tree, entries[1, 7]) == []


def test_nothing_is_found_in_nothing() -> None:
    tree, _ = tree_of([])
    assert radix.longest(tree, entry_of([1]).digests) == (None, 0)
    tree, _ = tree_of([[1, 2], [3]])
    assert radix.longest(tree, b"") == (None, 0)
    assert radix.longest(tree, entry_of([4]).digests) == (None, 0)


def test_the_last_removed_leaves_no_tree() -> None:
    contents = [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
    tree, entries = tree_of(contents)
    for content in contents:
        tree = radix.remove(tree, entries[tuple(content)])
    assert tree is None


def test_a_fork_that_parts_nothing_any_more_is_gone() -> None:
    """Two children, then one: the tree is that entry again, whichever went."""
    contents = [[1, 2, 3], [1, 2, 4], [1, 2]]
    for left in contents:
        tree, entries = tree_of(contents)
        for content in contents:
            if content != left:
                tree = radix.remove(tree, entries[tuple(content)])
        assert tree is entries[tuple(left)]


def test_a_tree_as_deep_as_a_chunk_may_be() -> None:
    """Each entry parts one block later from the same chain: as many forks as blocks."""
    chain = list(range(1, 513))
    contents = [[*chain[:depth], 10**9 + depth] for depth in range(511)] + [chain]
    tree, entries = tree_of(contents)
    assert radix.longest(tree, entry_of(chain).digests) == (entries[tuple(chain)], 512)
    for content in contents:
        tree = radix.remove(tree, entries[tuple(content)])
    assert tree is None


def check_against_list(contents: list[tuple[int, ...]], asked: Sequence[int]) -> None:
    """Insert, ask, remove in the same order; at each step the list says what is right."""
    tree: radix.Tree = None
    held: dict[tuple[int, ...], Entry] = {}

    def check() -> None:
        assert {entry.digests for entry in radix.entries(tree)} == {
            entry.digests for entry in held.values()
        }
        wanted = max((shared(content, asked) for content in held), default=0)
        found, blocks = radix.longest(tree, entry_of(asked).digests)
        assert blocks == wanted
        contents_of = {entry: content for content, entry in held.items()}
        assert (found is None) == (wanted == 0)
        if found is not None:
            assert shared(contents_of[found], asked) == wanted
        for content, entry in held.items():
            begins = [other for other in held if content[: len(other)] == other != content]
            above = radix.endings_above(tree, entry)
            assert sorted(contents_of[other] for other in above) == sorted(begins)
            is_covered = any(other[: len(content)] == content != other for other in held)
            assert radix.is_covered(tree, entry) == is_covered
            assert radix.twin(tree, entry_of(content)) is entry
        if tuple(asked) not in held:
            assert radix.twin(tree, entry_of(asked)) is None

    for content in contents:
        held[content] = entry_of(content)
        tree = radix.insert(tree, held[content])
        check()
    for content in contents:
        tree = radix.remove(tree, held.pop(content))
        check()


contents_of = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(
    st.lists(contents_of, max_size=8, unique_by=tuple),
    contents_of,
)
def test_a_tree_matches_as_a_list_does(contents: list[list[int]], asked: list[int]) -> None:
    """Digests as engines make them."""
    check_against_list([tuple(true_blocks(c)) for c in contents], true_blocks(asked))


@given(
    st.lists(contents_of.map(tuple), max_size=8, unique=True),
    contents_of,
)
def test_digests_that_contradict_each_other_do_not_tangle_a_tree(
    contents: list[tuple[int, ...]], asked: list[int]
) -> None:
    """Equal digests behind different ones, which only a faulty engine sends: a tree as any."""
    check_against_list(contents, asked)


@given(contents_of, contents_of)
def test_common_blocks_is_the_common_prefix(one: list[int], other: list[int]) -> None:
    found = radix.common_blocks(entry_of(one).digests, entry_of(other).digests)
    assert found == shared(one, other)
