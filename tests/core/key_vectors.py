"""Names of fixed content, by every function of `core.keys`: run by the tests, here and elsewhere.

    python key_vectors.py [spawn | fork | forkserver]

prints them as JSON, made in such a child process.

What is compared must never change: entries that rest in a tier are found by these names.
"""

import json
import multiprocessing
import sys
from collections.abc import Mapping
from typing import Any

from kvtide.core import keys

FIELDS: Mapping[str, Any] = {
    "model": {"hidden_size": 576, "tie": True, "rope": {"theta": 100_000.0, "type": None}},
    "weights": bytes(range(32)),
    "architectures": ["LlamaForCausalLM"],
    "kv_dtype": "bfloat16",
    "scales": [1.0, 0.5],
    "block_tokens": 16,
    "name": "Ā猫\ud800",
    "empty": [{}, [], "", b"", 0, False],
}
TOKENS = [(token * 2_654_435_761) % 49_152 for token in range(48)]
ITEMS = [keys.Item(3, 2, b"image one"), keys.Item(14, 20, b""), keys.Item(40, 1, b"three")]


def names() -> dict[str, str]:
    """All names, in hex."""
    mark = keys.fingerprint(FIELDS)
    root = keys.root_key(mark, epoch=b"", salt=None, adapter=b"")
    packed = keys.token_bytes(TOKENS)
    found = {
        "fingerprint": [mark],
        "fingerprint of nothing": [keys.fingerprint({})],
        "salt digest": [keys.salt_digest("tenant 7")],
        "root": [root],
        "root with epoch": [keys.root_key(mark, epoch=b"epoch", salt=None, adapter=b"")],
        "root with salt": [keys.root_key(mark, epoch=b"", salt="tenant 7", adapter=b"")],
        "root with adapter": [keys.root_key(mark, epoch=b"", salt="", adapter=bytes(32))],
        "root with all": [keys.root_key(mark, epoch=b"e", salt="s", adapter=b"a")],
        "digests of blocks": keys.block_digests(root, packed[:72], 4, 0),
        "keys of chunks": keys.chunk_keys(root, packed, 16, 0),
        "digests of blocks with items": keys.block_digests(root, packed[:64], 4, 0, ITEMS),
        "digests of a later chunk": keys.block_digests(root, packed[64:128], 4, 16, ITEMS),
        "keys of chunks with items": keys.chunk_keys(root, packed, 16, 0, ITEMS),
    }
    return {name: " ".join(part.hex() for part in parts) for name, parts in found.items()}


def _report(pipe: Any) -> None:
    pipe.send(names())


def main(method: str) -> dict[str, str]:
    """The names as a child process makes them that was started in this way."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=_report, args=(there,))
    child.start()
    found: dict[str, str] = here.recv()
    child.join()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1]) if sys.argv[1:] else names()))
