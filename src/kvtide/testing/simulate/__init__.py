"""A world by seed: real engines' connectors and real nodes, in one simulated machine.

    kernel    time, events, processes, threads of which one runs at a time
    waiting   what stands for `threading`, `queue`, `time`, `secrets`
    files     descriptors: sockets that carry real frames, events, pidfds; what stands for `os`
    loop      what stands for asyncio, in the node
    memory    regions as bytes, copies that take time, and a checker of who touches what
    edges     where each of these stands in production code, and nothing else does
    batches   a scheduler of toy requests: slices, preemption, aborts, priorities
    engine    an engine's processes: its scheduler, its ranks, the toy model
    places    what lies below a node: a tier that is slow, forgets, fails and damages
    world     the machine put together; faults; what must hold at each step and at the end
    main      many seeds, for minutes

Production code runs as it is, threads and all: the kernel alone decides which of them goes on, so
a seed decides everything, and a failure happens again.
"""
