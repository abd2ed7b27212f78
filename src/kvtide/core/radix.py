"""The children of one key, as a radix tree over block digests.

A block digest stands for all tokens from the chunk's start, so two children share exactly the
blocks up to which their digests are equal, and a binary search finds where they part. A match
costs blocks, never children.

    parent ── Fork(2 blocks) ──┬── entry A (4 blocks)
                 │             └── entry B (3 blocks)
                 └ ending: entry T, a tail of just those 2 blocks

Everything in a tree is visible, and every fork has an entry below it, so any entry below serves a
partial match. Most keys have one child: then the tree is that entry itself.

Digests come from outside. Whole prefixes are compared, not single digests, so that an engine whose
digests contradict each other cannot tangle the tree; it only finds less.
"""

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

from kvtide.core.keys import INNER_DIGEST_BYTES

if TYPE_CHECKING:
    from kvtide.core.index import Entry

Tree: TypeAlias = Union["Fork", "Entry", None]


class Fork:
    """Where children of a key part."""

    __slots__ = ("children", "digests", "ending")

    def __init__(self, digests: bytes, ending: "Entry | None") -> None:
        self.digests = digests
        self.ending = ending
        self.children: dict[bytes, Fork | Entry] = {}


class Longest(NamedTuple):
    """An entry that shares the most leading blocks with something, and how many; or none."""

    entry: "Entry | None"
    blocks: int


NONE = Longest(None, 0)


def common_blocks(one: bytes, other: bytes) -> int:
    """How many leading blocks two chunks share, given their short digests one after another."""
    low, high = 0, min(len(one), len(other)) // INNER_DIGEST_BYTES
    middle = high
    while low < high:
        size = middle * INNER_DIGEST_BYTES
        if one[:size] == other[:size]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


def _digest(digests: bytes, block: int) -> bytes:
    return digests[block * INNER_DIGEST_BYTES : (block + 1) * INNER_DIGEST_BYTES]


def _blocks(digests: bytes) -> int:
    return len(digests) // INNER_DIGEST_BYTES


def insert(tree: Tree, entry: "Entry") -> "Fork | Entry":
    """The tree with one more entry, which must not be in it yet."""
    if tree is None:
        return entry
    shared = common_blocks(tree.digests, entry.digests)
    if shared < _blocks(tree.digests):
        ends_here = shared == _blocks(entry.digests)
        fork = Fork(entry.digests[: shared * INNER_DIGEST_BYTES], entry if ends_here else None)
        fork.children[_digest(tree.digests, shared)] = tree
        if not ends_here:
            fork.children[_digest(entry.digests, shared)] = entry
        return fork
    if not isinstance(tree, Fork):
        tree = Fork(tree.digests, tree)
    if shared == _blocks(entry.digests):
        assert tree.ending is None, "one content under two entries"
        tree.ending = entry
    else:
        branch = _digest(entry.digests, shared)
        tree.children[branch] = insert(tree.children.get(branch), entry)
    return tree


def remove(tree: Tree, entry: "Entry") -> Tree:
    """The tree without this entry, which must be in it."""
    if tree is entry:
        return None
    assert isinstance(tree, Fork), "the entry is not in this tree"
    if tree.ending is entry:
        tree.ending = None
    else:
        branch = _digest(entry.digests, _blocks(tree.digests))
        rest = remove(tree.children[branch], entry)
        if rest is None:
            del tree.children[branch]
        else:
            tree.children[branch] = rest
    if not tree.children:
        return tree.ending
    if tree.ending is None and len(tree.children) == 1:
        return next(iter(tree.children.values()))
    return tree


def longest(tree: Tree, digests: bytes) -> Longest:
    """An entry that shares the most leading blocks with `digests`, and how many."""
    shared = 0
    while tree is not None:
        shared = common_blocks(tree.digests, digests)
        if not isinstance(tree, Fork) or shared < _blocks(tree.digests):
            break
        below = tree.children.get(_digest(digests, shared))
        if below is None:
            break
        tree = below
    if not shared or tree is None:
        return NONE
    while isinstance(tree, Fork):
        tree = tree.ending or next(iter(tree.children.values()))
    return Longest(tree, shared)


def twin(tree: Tree, entry: "Entry") -> "Entry | None":
    """The entry of the tree that has exactly the blocks of this one."""
    found, shared = longest(tree, entry.digests)
    is_twin = found is not None and len(found.digests) == len(entry.digests)
    return found if is_twin and shared == _blocks(entry.digests) else None


def endings_above(tree: Tree, entry: "Entry") -> "list[Entry]":
    """The other entries whose blocks are all leading blocks of `entry`."""
    found = []
    while isinstance(tree, Fork):
        if tree.ending is not None and tree.ending is not entry:
            found.append(tree.ending)
        depth = _blocks(tree.digests)
        if depth >= _blocks(entry.digests):
            break
        tree = tree.children[_digest(entry.digests, depth)]
    return found


def is_covered(tree: Tree, entry: "Entry") -> bool:
    """Whether another entry of the tree begins with all blocks of this one, which is in it."""
    while isinstance(tree, Fork):
        if tree.ending is entry:
            return True
        tree = tree.children[_digest(entry.digests, _blocks(tree.digests))]
    return False


def entries(tree: Tree) -> "list[Entry]":
    """All entries of the tree."""
    found: list[Entry] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Fork):
            waiting.extend(node.children.values())
            node = node.ending
        if node is not None:
            found.append(node)
    return found
