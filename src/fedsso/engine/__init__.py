"""Engines: they own the loop, the mean, the randomness and the devices; algorithms only compute.

A run reads these modules in this order:

    settings.py    what a user may choose, checked once
    simulate.py    `Trials`: the state of a run and the life of a round
    rounds.py      all draws: who takes part, who answers, which rows a step sees
    gather.py      rows as mini-batches in floating point, for a few clients at a time
    uplink.py      compression of what clients send
    ledger.py      bytes that travel
    evaluate.py    loss and metrics on rows of the federation, with metrics.py
    state.py       what a round changes, as one immutable value
    checkpoint.py  that value in a file
    ranks.py       several processes that torchrun has started, and what they exchange
    dealing.py     which of them computes which client
    halting.py     how they stop together
    threads.py     switches of torch that are set while a run computes

The server's arrays have the trials first, [trials, d]; those of clients have the clients before
them, [clients, trials, d]. A trial is one setting of the hyper-parameters: the trials of a sweep
are computed together.
"""
