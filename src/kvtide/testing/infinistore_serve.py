"""Starts an InfiniStore server as its own program does, without two things that this wants.

    python infinistore_serve.py --service-port … --prealloc-size 1 …

Its package imports torch for its clients, of which a server makes none; and it keeps its process
from being ended for want of memory, which only root may ask for. No more of it is replaced. It
runs by itself, with the package's folder in the path: nothing of ours is imported.
"""

import sys
import types


def main() -> None:
    """As `infinistore.server.main`, without these two."""
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    sys.modules["torch"] = torch
    from infinistore import server

    server.prevent_oom = lambda: None
    server.main()


if __name__ == "__main__":
    main()
