"""Names of content: the same everywhere, for ever, and never the same for two different things."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvtide.core import keys
from tests.core import key_vectors

SOURCE = Path(keys.__file__).parents[2]
MARK = bytes(range(32))

GOLDEN = {
    "fingerprint": "aba090085da4f4c8eda969da34929f5d87d39c7611c2281ef1cf8e2ea50de1e0",
    "fingerprint of nothing": "75e7549a86d1920e0900c10f73d593580790676ba20a1fe34da4dd0f32920a71",
    "salt digest": "cfce5f7876e2993fb5876747f2cb945ff058cefaee3fad810cbf6865c39a7a1a",
    "root": "af18e8e86ee79950387f17c6aae85ee988af8b3decef4fcc5f3f1b0fb8f277f7",
    "root with epoch": "801d2f82f40d1498237bd79eb2938a96145ac6c00984703cb52b974d6ec0e09f",
    "root with salt": "cb779ab495f44fc3db36eca0db5603196a44f0471545b8c275e5573d3c57af68",
    "root with adapter": "fff74dfbba7bd97d90529a75612ebe02031ea204aeefe62a77166c13e6cbc746",
    "root with all": "8def9bc3df5d9ab4f58f7972b4e29fe2029a5776bd16f9da4edcd6a013755604",
    "digests of blocks": (
        "5657c72210ce42d035a57c1b30dc4be265b4d172abd9f04b15aa3999e81175f2 "
        "721b825c38725c86cce101c705c2e78574f02d81d6ecb97b3a043dc999541801 "
        "42478ba3713321e15ad13c602852a0939a92714d473a3991fdb6cdb667cc46b0 "
        "82a3b54cf59c4b1455c5eaf0d2c7752cf22cd88b8b3ef95e7b8291fbd0578ad5"
    ),
    "keys of chunks": (
        "82a3b54cf59c4b1455c5eaf0d2c7752cf22cd88b8b3ef95e7b8291fbd0578ad5 "
        "13c0f41fdeba4be79a1a641e60c4105cddc1ad6fc172e03331af7c01a822e25d "
        "aa6183156635e878e4d9a7a05439b6dfc506e64a41101b4be4bf41f640af544b"
    ),
    "digests of blocks with items": (
        "17203a1c05dab3296adcee959ab9532fee2a4f851bb230137008b8dcc48df58c "
        "488e903a59224f11bbea8d1c5395106435590af7df3257b41d2b11756781f253 "
        "1d9af83bc9b62db97568a17feaef223fed85f720cbec585e28ee4b7377ba34b1 "
        "76e66667e4135b288f2481b5ce3ac0cff2ae705584738745add1429f49b8b6e7"
    ),
    "digests of a later chunk": (
        "69832a59eb239c30f036e9d4df1ad99b7d9fca37104ec3f7e2ee07afd35a7b0a "
        "393d610c300f90c2dea289e8af4bfb5dfe6c9ee45d86e3fc5a4770d1227b52b2 "
        "1e097b5435c21b1db8a50215e71778bbf479f601431749240f4a910e7f3ae4ee "
        "0faa0a697ab7ef0ba47efe8f947a13e37810291090f4722ab4eb798d915c85f9"
    ),
    "keys of chunks with items": (
        "76e66667e4135b288f2481b5ce3ac0cff2ae705584738745add1429f49b8b6e7 "
        "51b3d62ac1c468b5ab3991e36f70f0248cbb8e59a7fc4f34e65957c902ddcfbc "
        "306392c577ea8e40c196a73cc5123a7e51251b2990337b3e189f33f1e2932d6f"
    ),
}


# ---- the same everywhere


def test_names_are_those_that_were_committed() -> None:
    """Whoever changes one of these makes every stored entry unreachable: raise the version."""
    assert key_vectors.names() == GOLDEN


def names_elsewhere(python: str, method: str, hash_seed: str) -> dict[str, str]:
    """What a child process, started in this way by that interpreter, calls the same things."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": hash_seed}
    script = str(Path(key_vectors.__file__))
    command = [python, script, method]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_another_process_gives_the_same_names(method: str, hash_seed: str) -> None:
    """Processes differ in hash seed and start method, as engines and nodes do."""
    assert names_elsewhere(sys.executable, method, hash_seed) == GOLDEN


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_another_python_gives_the_same_names(version: str) -> None:
    """Each interpreter that is installed beside this one."""
    python = next(interpreters(version), None)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    assert names_elsewhere(python, "spawn", "random") == GOLDEN


def interpreters(version: str) -> Iterator[str]:
    """Working interpreters of a version: those on the path, and those that pyenv keeps."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    kept = [str(path / "bin" / "python") for path in sorted(versions.glob(f"{version}.*"))]
    for python in [*filter(None, [shutil.which(f"python{version}")]), *kept]:
        check = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([python, "-c", check], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            yield python


# ---- as the architecture says


def test_a_block_digest_is_made_as_the_architecture_says() -> None:
    """By hand: tag, version, parent, tokens, overlapping items, their count, the token count."""
    tokens = list(range(100, 116))
    items = [keys.Item(2, 3, b"before"), keys.Item(9, 4, b"cat"), keys.Item(20, 9, b"after")]
    digests = keys.block_digests(MARK, keys.token_bytes(tokens[4:12]), 4, 4, items)
    head = b"kvtide block" + struct.pack("<I", keys.FORMAT_VERSION) + MARK
    before = struct.pack("<iH", -2, 6) + b"before"
    cat = struct.pack("<iH", 5, 3) + b"cat"
    assert digests == [
        hashlib.sha256(
            head + struct.pack("<4I", *tokens[4:8]) + before + struct.pack("<II", 1, 4)
        ).digest(),
        hashlib.sha256(
            head + struct.pack("<8I", *tokens[4:12]) + before + cat + struct.pack("<II", 2, 8)
        ).digest(),
    ]


def test_a_root_key_is_made_as_the_architecture_says() -> None:
    """By hand: tag, version, fingerprint, then length and bytes of epoch, salt and adapter."""
    tag = b"kvtide root"
    version = struct.pack("<I", keys.FORMAT_VERSION)
    by_hand = tag + struct.pack("<I", 4) + version + MARK
    for part in (b"epoch", b"tenant", b""):
        by_hand += struct.pack("<I", len(part)) + part
    wanted = hashlib.sha256(by_hand).digest()
    assert keys.root_key(MARK, epoch=b"epoch", salt="tenant", adapter=b"") == wanted


def test_no_salt_and_an_empty_salt_are_one() -> None:
    roots = {keys.root_key(MARK, epoch=b"", salt=salt, adapter=b"") for salt in (None, "")}
    assert len(roots) == 1
    assert keys.salt_digest(None) == keys.salt_digest("") == b""


def test_a_salt_that_is_no_text_still_isolates() -> None:
    """JSON may carry half of a surrogate pair; it must neither raise nor meet another salt."""
    salts = ["\ud800", "\udc00", "\ud800\udc00", "\U00010000", "?", "\ufffd"]
    roots = {keys.root_key(MARK, epoch=b"", salt=salt, adapter=b"") for salt in salts}
    assert len(roots) == len({keys.salt_digest(salt) for salt in salts}) == len(salts)


def test_tokens_are_packed_alike_from_a_list_and_from_an_array() -> None:
    tokens = [0, 1, 255, 65_536, 2**32 - 1]
    assert keys.token_bytes(tokens) == struct.pack("<5I", *tokens)
    assert keys.packed_tokens(array("I", tokens)) == keys.token_bytes(tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused(token: int) -> None:
    """A placeholder (-1) must never be taken for a token."""
    with pytest.raises(OverflowError):
        keys.token_bytes([token])


# ---- two things never get one name

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """A form that is equal only where encodings must be: 1, 1.0 and True are three things."""
    if isinstance(value, dict):
        return ("m", frozenset((name, typed(part)) for name, part in value.items()))
    if isinstance(value, list | tuple):
        return ("l", tuple(typed(part) for part in value))
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@given(values, values)
def test_encodings_are_equal_exactly_where_values_are(one: Any, other: Any) -> None:
    assert (keys.encode(one) == keys.encode(other)) == (typed(one) == typed(other))


@given(st.lists(values, max_size=4), st.lists(values, max_size=4))
@example(["a", "b"], ["asb"])
@example([["a"], "b"], [["a", "b"]])
@example([1, 2], ["1i2"])
@example([b"x", b""], [b"xb"])
def test_encodings_delimit_themselves(ones: list[Any], others: list[Any]) -> None:
    """Encodings set one behind the other can be told apart, so no part slides into the next."""
    joined = b"".join(map(keys.encode, ones))
    if joined == b"".join(map(keys.encode, others)):
        assert typed(ones) == typed(others)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0, False),
        (0, None),
        ("1", 1),
        ("a", b"a"),
        ("", None),
        ([], {}),
        ([], None),
        ([[1], 2], [1, [2]]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": {"b": 1}}, {"a": {}, "b": 1}),
        ({"a": None}, {}),
        ({"ab": "c"}, {"a": "bc"}),
    ],
)
def test_values_that_look_alike_are_told_apart(one: Any, other: Any) -> None:
    assert keys.encode(one) != keys.encode(other)


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), {1: "a"}, bytearray(b"a"), range(3), 1j, [object()], {"a": {1}}]
)
def test_a_value_of_another_type_is_refused(value: Any) -> None:
    """Left out or turned into text it would give two engines one fingerprint."""
    with pytest.raises(TypeError, match="cannot hold"):
        keys.encode(value)


def test_the_order_of_fields_says_nothing() -> None:
    fields: dict[str, Any] = {"a": 1, "b": [1, 2], "c": {"x": 1, "y": 2}}
    turned: dict[str, Any] = {"c": {"y": 2, "x": 1}, "b": (1, 2), "a": 1}
    assert keys.fingerprint(fields) == keys.fingerprint(turned)


PARTS_OF_A_ROOT = st.tuples(st.binary(max_size=4), st.text(max_size=4), st.binary(max_size=4))


@given(PARTS_OF_A_ROOT, PARTS_OF_A_ROOT)
@example((b"ab", "", b""), (b"a", "b", b""))
@example((b"", "ab", b""), (b"", "a", b"b"))
@example((b"ab", "", b""), (b"", "", b"ab"))
def test_epoch_salt_and_adapter_are_never_confused(
    one: tuple[bytes, str, bytes], other: tuple[bytes, str, bytes]
) -> None:
    """The bytes of one part must not pass for those of its neighbour."""
    roots = [
        keys.root_key(MARK, epoch=epoch, salt=salt, adapter=adapter)
        for epoch, salt, adapter in (one, other)
    ]
    assert (roots[0] == roots[1]) == (one == other)


def test_a_salt_is_not_an_adapter_nor_an_epoch() -> None:
    parts: list[dict[str, Any]] = [
        {"epoch": b"x", "salt": "", "adapter": b""},
        {"epoch": b"", "salt": "x", "adapter": b""},
        {"epoch": b"", "salt": "", "adapter": b"x"},
        {"epoch": b"", "salt": "xx", "adapter": b""},
        {"epoch": b"", "salt": "x", "adapter": b"x"},
    ]
    assert len({keys.root_key(MARK, **part) for part in parts}) == len(parts)


tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens_of, tokens_of)
def test_different_tokens_get_different_keys(one: list[int], other: list[int]) -> None:
    """Also where one is the beginning of the other: the count of tokens is in the digest."""
    both = [keys.chunk_key(MARK, keys.token_bytes(tokens), 0) for tokens in (one, other)]
    assert (both[0] == both[1]) == (one == other)


def test_another_parent_gives_another_key() -> None:
    packed = keys.token_bytes(range(8))
    assert keys.chunk_key(MARK, packed, 0) != keys.chunk_key(MARK[::-1], packed, 0)


def overlaps(item: keys.Item, start: int, end: int) -> bool:
    return item.first_token < end and item.first_token + item.token_count > start


items_of = st.lists(
    st.builds(keys.Item, st.integers(0, 20), st.integers(1, 6), st.binary(max_size=3)), max_size=3
)


@given(items_of, items_of)
def test_other_items_or_items_elsewhere_give_another_key(
    ones: list[keys.Item], others: list[keys.Item]
) -> None:
    """Only what overlaps the chunk counts: where it begins and what it is."""
    packed = keys.token_bytes(range(8))
    seen = [
        [(item.first_token, item.content_id) for item in items if overlaps(item, 4, 12)]
        for items in (ones, others)
    ]
    both = [keys.chunk_key(MARK, packed, 4, items) for items in (ones, others)]
    assert (both[0] == both[1]) == (seen[0] == seen[1])


@pytest.mark.parametrize("length", [1, 16, 64, keys.CONTENT_ID_BYTES_MAX])
def test_each_byte_of_an_items_id_counts(length: int) -> None:
    """Those that begin alike, or end alike, are two; nothing of a digest is left out."""
    name = bytes(length)
    places = range(length) if length <= 64 else (0, 1 << 8, 1 << 15, length - 1)
    names = [name, *(name[:at] + b"\1" + name[at + 1 :] for at in places), name[1:]]
    packed = keys.token_bytes(range(8))
    found = {keys.chunk_key(MARK, packed, 0, [keys.Item(2, 4, one)]) for one in names}
    assert len(found) == len(names)


def test_the_same_image_at_another_place_is_another_prefix() -> None:
    """Placeholder tokens are equal; only the item tells the prompts apart."""
    packed = keys.token_bytes([7] * 16)
    found = {
        tuple(keys.block_digests(MARK, packed, 4, 0, [keys.Item(first, 4, b"cat")]))
        for first in range(12)
    }
    assert len(found) == 12


def test_an_item_changes_no_block_before_it() -> None:
    """Two prompts share the text that stands before their different images."""
    packed = keys.token_bytes(range(16))
    cat = keys.block_digests(MARK, packed, 4, 0, [keys.Item(9, 4, b"cat")])
    dog = keys.block_digests(MARK, packed, 4, 0, [keys.Item(9, 4, b"dog")])
    none = keys.block_digests(MARK, packed, 4, 0)
    assert cat[:2] == dog[:2] == none[:2]
    assert cat[2] != dog[2] != none[2]


# ---- whole, in parts, and as a prompt grows


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 4),
    items_of,
)
def test_chunk_keys_are_the_digests_of_last_blocks(
    tokens: list[int], block_tokens: int, blocks_per_chunk: int, items: list[keys.Item]
) -> None:
    """A chunk's key is its last block's digest, and the parent of the next chunk."""
    size = block_tokens * blocks_per_chunk
    packed = keys.token_bytes(tokens)
    parent, wanted = MARK, []
    for start in range(0, len(tokens) - size + 1, size):
        chunk = packed[4 * start : 4 * (start + size)]
        digests = keys.block_digests(parent, chunk, block_tokens, start, items)
        assert len(digests) == blocks_per_chunk
        assert keys.chunk_key(parent, chunk, start, items) == digests[-1]
        parent = digests[-1]
        wanted.append(parent)
    assert keys.chunk_keys(MARK, packed, size, 0, items) == wanted


@given(st.lists(st.integers(0, 99), max_size=60), st.data(), items_of)
def test_keys_made_as_a_request_grows_are_those_of_the_whole(
    tokens: list[int], data: st.DataObject, items: list[keys.Item]
) -> None:
    """A request's keys are made once for each chunk, whenever it becomes whole."""
    whole = keys.chunk_keys(MARK, keys.token_bytes(tokens), 4, 0, items)
    grown: list[bytes] = []
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        start = 4 * len(grown)
        parent = grown[-1] if grown else MARK
        packed = keys.token_bytes(tokens[start:end])
        grown += keys.chunk_keys(parent, packed, 4, start, items)
    assert grown == whole


@given(st.lists(st.integers(0, 99), min_size=1, max_size=24), st.integers(1, 5))
def test_the_digest_of_a_block_does_not_depend_on_what_follows(
    tokens: list[int], block_tokens: int
) -> None:
    """Tails match chunks, and a lookup's last digests match longer ones."""
    packed = keys.token_bytes(tokens)
    whole = keys.block_digests(MARK, packed, block_tokens, 0)
    assert len(whole) == len(tokens) // block_tokens
    for count in range(len(whole) + 1):
        part = packed[: 4 * block_tokens * count]
        assert keys.block_digests(MARK, part, block_tokens, 0) == whole[:count]


# ---- every field counts


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside, containers too."""
    yield path
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, list | tuple):
        for position, part in enumerate(value):
            yield from leaves(part, (*path, position))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """A copy with one part replaced."""
    if not path:
        return to
    if isinstance(value, dict):
        return value | {path[0]: changed(value[path[0]], path[1:], to)}
    parts = list(value)
    parts[path[0]] = changed(parts[path[0]], path[1:], to)
    return parts


@pytest.mark.parametrize("path", [path for path in leaves(dict(key_vectors.FIELDS)) if path])
def test_any_one_part_of_a_fingerprint_changes_it(path: tuple[Any, ...]) -> None:
    fields = dict(key_vectors.FIELDS)
    others: list[Any] = ["another", 12345, None, [], {}, b"bytes"]
    for to in others:
        other = changed(fields, path, to)
        is_same = typed(other) == typed(fields)
        assert (keys.fingerprint(other) == keys.fingerprint(fields)) == is_same, (path, to)


@given(st.dictionaries(st.text(max_size=6), values, min_size=1), st.data())
def test_any_field_changed_added_or_gone_changes_the_fingerprint(
    fields: dict[str, Any], data: st.DataObject
) -> None:
    mark = keys.fingerprint(fields)
    name = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(values)
    assume(typed(value) != typed(fields[name]))
    assert keys.fingerprint(fields | {name: value}) != mark
    assert keys.fingerprint({k: v for k, v in fields.items() if k != name}) != mark
    assert keys.fingerprint(fields | {name + "x" * 7: value}) != mark
