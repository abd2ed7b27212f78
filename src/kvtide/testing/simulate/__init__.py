"""A world by seed: real engines' connectors and real nodes, in one simulated machine.

    kernel          time, events, processes, threads of which one runs at a time
    waiting         what stands for `threading`, `queue`, `time`, `secrets`
    files, sockets  descriptors, `poll`; sockets that carry real frames; what stands for `os`
    loop            what stands for asyncio, in the node
    memory          regions as bytes, copies that take time, a checker of who touches what
    edges           where each of these stands in production code, and nothing else does
    engine_batches  the scheduler of a toy engine: slices, preemption, aborts, priorities
    blocks          its requests and KV blocks
    engine          its processes: the scheduler's, the ranks', with the toy model
    node            a node: the real runtime, watched
    places          what lies below: a disk of each home, a server that all share; their faults
    plan            what happens, drawn beforehand, so that less of it can happen
    world           the machine put together, and its faults
    oracle          what must hold when nothing happens any more
    main            many seeds, for minutes; the fewest actions that still fail

Production code runs as it is, threads and all: the kernel alone decides which of them goes on, so
a seed decides everything, and a failure happens again.
"""
