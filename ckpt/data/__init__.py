"""The data rooms: a data stream whose every batch is a pure function of (seed, epoch, position).

- order: the keyed permutation, plain integers; docs/data-order.md is its normative text
- position: which positions a rank takes, and where a stream stands
- seeding: the global generators as functions of (seed, epoch, position)
- feed: what crosses to a worker, and what the worker does with it
- sampler, loader, statedict: what users hold
"""
