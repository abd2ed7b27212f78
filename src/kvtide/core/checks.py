"""What no engine would send: refused as `WireError` before anything has changed.

The wire checks types; here are the lengths, ranges and relations. Data from outside is never
asserted on (an assertion ends the node), and a message that is refused costs its connection only.
"""

from kvtide.core import messages as m
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import BLOCKS_PER_CHUNK_MAX, CELL_ALIGN_BYTES, KVLayout
from kvtide.core.reasons import OffReason, Verdict
from kvtide.errors import WireError

WORKERS_MAX = 1024
"""Of one engine; on one machine there are as many as it has devices."""
CELL_BYTES_MAX = 1 << 40
"""More than a machine has memory for: sizes of chunks and regions stay far from 64 bits."""
LAYOUT_TOKENS_MAX = 1 << 20
"""Of one chunk, whatever settings allow: it is a block at least, and engines choose those."""
NAME_CHARS_MAX = 256
"""An engine_id, a version, the name of a counter."""
TEXT_CHARS_MAX = 4096
"""A label, a detail: shown to people, and kept for as long as the engine lives."""
RANDOM_BYTES_MAX = 64
"""An incarnation, an epoch, a digest of a salt."""
FIELDS_MAX = 1024
"""Of a fingerprint: several times what an engine has; kept while it lives."""
COUNT_NAMES_MAX = 256
"""Names of counters that an engine may send."""
_VERDICTS = ", ".join(Verdict)


def version_fault(node_version: str, wire_version: int, version: str) -> str:
    """Why a peer that speaks this version of the protocol is not understood; empty where it is."""
    if wire_version == m.WIRE_VERSION:
        return ""
    return (
        f"the node (kvtide {node_version}) speaks version {m.WIRE_VERSION}, "
        f"the engine (kvtide {version or 'unknown'}) version {wire_version}"
    )


def check_scheduler(hello: m.SchedulerHello) -> None:
    """Judge the first words of a scheduler."""
    _check_process(hello.engine_id, hello.incarnation)
    _check_text("version", hello.version, NAME_CHARS_MAX)
    _check_text("label", hello.label, TEXT_CHARS_MAX)
    if not 0 < hello.worker_count <= WORKERS_MAX:
        raise WireError(f"an engine of {hello.worker_count} workers; 1 to {WORKERS_MAX} are taken")


def check_worker(hello: m.WorkerHello) -> None:
    """Judge the first words of a worker."""
    _check_process(hello.engine_id, hello.incarnation)
    if not 0 <= hello.rank < WORKERS_MAX:
        raise WireError(f"a worker of rank {hello.rank}; 0 to {WORKERS_MAX - 1} are taken")
    if not 0 <= hello.shard < hello.shard_count <= WORKERS_MAX:
        raise WireError(
            f"shard {hello.shard} of {hello.shard_count}; numbers begin with 0, of at most"
            f" {WORKERS_MAX}"
        )
    _check_cells([hello.cell_bytes])


def _check_process(engine_id: str, incarnation: bytes) -> None:
    if not engine_id:
        raise WireError("an engine without engine_id; each needs one of its own")
    _check_text("engine_id", engine_id, NAME_CHARS_MAX)
    if not 0 < len(incarnation) <= RANDOM_BYTES_MAX:
        raise WireError(
            f"an incarnation of {len(incarnation)} bytes; 1 to {RANDOM_BYTES_MAX} are taken"
        )


def check_identity(identity: m.Identity) -> KVLayout | None:
    """The layout that an identity names; None where it says that the engine is off."""
    _check_text("off_detail", identity.off_detail, TEXT_CHARS_MAX)
    _check_fields(identity.fields)
    if identity.fingerprint or not identity.off_reason:
        _check_fingerprint(identity.fingerprint)
    if identity.off_reason:
        if identity.off_reason not in list(OffReason):
            raise WireError(
                f"off for an unknown reason, {identity.off_reason[:NAME_CHARS_MAX]!r}; known are"
                f" {', '.join(OffReason)}"
            )
        return None
    if len(identity.weights) > RANDOM_BYTES_MAX:
        raise WireError(
            f"a weights digest of {len(identity.weights)} bytes; at most {RANDOM_BYTES_MAX} are"
            " taken"
        )
    if identity.step_tokens < 0:
        raise WireError(f"steps of {identity.step_tokens} tokens; 0 is the least")
    block_tokens, chunk_tokens = identity.block_tokens, identity.chunk_tokens
    is_fit = 0 < block_tokens <= chunk_tokens <= LAYOUT_TOKENS_MAX
    if not is_fit or chunk_tokens % block_tokens:
        raise WireError(
            f"chunks of {chunk_tokens} tokens in blocks of {block_tokens}; whole blocks are taken,"
            f" at most {LAYOUT_TOKENS_MAX} tokens in all"
        )
    if chunk_tokens // block_tokens > BLOCKS_PER_CHUNK_MAX:
        raise WireError(
            f"chunks of {chunk_tokens // block_tokens} blocks; at most {BLOCKS_PER_CHUNK_MAX} are"
            " taken: give the engine a smaller chunk_tokens"
        )
    if not 0 < len(identity.cell_bytes) <= WORKERS_MAX:
        raise WireError(
            f"chunks of {len(identity.cell_bytes)} shards; 1 to {WORKERS_MAX} are taken"
        )
    _check_cells(identity.cell_bytes)
    return KVLayout(block_tokens, chunk_tokens, tuple(identity.cell_bytes))


def _check_fingerprint(fingerprint: bytes) -> None:
    if len(fingerprint) != KEY_BYTES:
        raise WireError(f"a fingerprint of {len(fingerprint)} bytes; it has {KEY_BYTES}")


def _check_cells(cell_bytes: list[int]) -> None:
    for size in cell_bytes:
        if not 0 < size <= CELL_BYTES_MAX or size % CELL_ALIGN_BYTES:
            raise WireError(
                f"a cell of {size} bytes; multiples of {CELL_ALIGN_BYTES} are taken, up to"
                f" {CELL_BYTES_MAX}"
            )


def check_clear(message: m.Clear) -> None:
    """Judge what an engine takes back."""
    _check_fingerprint(message.fingerprint)
    if len(message.salt_digest) > RANDOM_BYTES_MAX:
        raise WireError(
            f"a salt of {len(message.salt_digest)} bytes; at most {RANDOM_BYTES_MAX} are taken"
        )


def check_compared(message: m.Compared) -> None:
    """Judge what a canary has shown."""
    _check_fingerprint(message.fingerprint)
    if message.verdict not in list(Verdict):
        raise WireError(f"the verdict {message.verdict[:NAME_CHARS_MAX]!r}; known are {_VERDICTS}")
    if not message.difference >= 0:
        raise WireError(f"a difference of {message.difference}; 0 is the least")


def check_root(message: m.RegisterRoot) -> None:
    """Judge a root key."""
    if len(message.root) != KEY_BYTES:
        raise WireError(f"a root key of {len(message.root)} bytes; it has {KEY_BYTES}")
    for name, value in (("epoch", message.epoch), ("salt digest", message.salt_digest)):
        if len(value) > RANDOM_BYTES_MAX:
            raise WireError(f"{name} of {len(value)} bytes; at most {RANDOM_BYTES_MAX} are taken")


def check_chain(keys: bytes, digests: bytes, layout: KVLayout | None) -> None:
    """Judge the keys and block digests of a lookup or a probe."""
    if len(keys) % KEY_BYTES or len(digests) % INNER_DIGEST_BYTES:
        raise WireError(
            f"keys of {len(keys)} bytes with digests of {len(digests)} bytes; each key has"
            f" {KEY_BYTES}, each digest {INNER_DIGEST_BYTES}"
        )
    blocks_max = layout.blocks_per_chunk if layout is not None else BLOCKS_PER_CHUNK_MAX
    if len(digests) > blocks_max * INNER_DIGEST_BYTES:
        raise WireError(
            f"digests of {len(digests)} bytes are more than one chunk's; it has {blocks_max} of"
            f" {INNER_DIGEST_BYTES}"
        )


def check_offer(offer: m.StoreOffer, layout: KVLayout) -> None:
    """Judge the chunks that an engine offers to store."""
    whole = layout.blocks_per_chunk * INNER_DIGEST_BYTES
    if len(offer.keys) != len(offer.digests):
        raise WireError(
            f"{len(offer.keys)} keys came with {len(offer.digests)} digests; each key has its own"
        )
    for position, (key, digests) in enumerate(zip(offer.keys, offer.digests, strict=True)):
        is_last = position == len(offer.keys) - 1
        size = len(digests)
        if len(key) != KEY_BYTES or not 0 < size <= whole or size % INNER_DIGEST_BYTES:
            raise WireError(
                f"a key of {len(key)} bytes with digests of {size} bytes; a key has {KEY_BYTES},"
                f" its digests are 1 to {layout.blocks_per_chunk} of {INNER_DIGEST_BYTES}"
            )
        if size < whole and not is_last:
            raise WireError(
                f"chunk {position} of {len(offer.keys)} has digests of {size} bytes; all but the"
                f" last have {whole}"
            )
        if digests[-INNER_DIGEST_BYTES:] != key[:INNER_DIGEST_BYTES]:
            raise WireError(
                f"the key of chunk {position} does not begin with the digest of its last block;"
                " each key does"
            )


def check_counts(increments: dict[str, int], known: dict[str, int]) -> None:
    """Judge counter increments of an engine, given the counters that it has already."""
    for name, increment in increments.items():
        _check_text("counter", name, NAME_CHARS_MAX)
        if increment < 0:
            raise WireError(f"counter {name!r} goes back by {-increment}; counters only grow")
    count = len(known.keys() | increments.keys())
    if count > COUNT_NAMES_MAX:
        raise WireError(f"{count} counters; at most {COUNT_NAMES_MAX} are taken")


def _check_text(what: str, text: str, chars_max: int) -> None:
    if len(text) > chars_max:
        raise WireError(f"{what} of {len(text)} characters; at most {chars_max} are taken")


def _check_fields(fields: dict[str, str]) -> None:
    if len(fields) > FIELDS_MAX:
        raise WireError(f"{len(fields)} fields; at most {FIELDS_MAX} are taken")
    for name, value in fields.items():
        _check_text("a field's name", name, NAME_CHARS_MAX)
        _check_text("a field's value", value, TEXT_CHARS_MAX)
