"""The contract's bounds on waiting: each has its name from docs/words.md, and stands here once.

A part that waits names its own limit after what it waits for, and takes the length from here: so
what two processes must agree on cannot drift apart. A deadline bounds waiting; it proves nothing.
"""

T_LOOKUP_S = 0.001
"""T_lookup: waiting for answers on the engine's scheduler thread, per step, all requests together:
a step takes ten times as long and more, so nobody feels it."""
T_ANSWER_MS = 250
"""T_answer: from a question to the node's first word. A node that is alive takes under a
millisecond; this is what a machine that swaps or is out of processors may add."""
T_LOAD_MS = 2_000
"""T_load: extra wait of one request for external data that makes no progress."""
T_PUT_MS = 10_000
"""T_put: life of one queued store; and of one grant that nobody answers, beside what the engine's
steps take."""
T_START_MS = 10_000
"""T_start: start with nobody there."""
T_STOP_S = 10.0
"""T_stop of a node: service managers and container runtimes kill after this at the earliest."""
T_STOP_CONNECTOR_S = 2.0
"""T_stop of a connector: vLLM kills its processes after 4 to 5 s."""
HEARTBEAT_S = 1.0
"""Between two pings on an idle connection; T_heal is two of them and 5 s."""
