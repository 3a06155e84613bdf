"""What every other package stands on: files, locks, checksums, randomness and trees of tensors.

The modules know nothing of federated learning:

    intake        reads files of other people, within limits
    files, seal   write files whole, and notice when one was damaged
    lock          one writer for a folder
    rng           random numbers as functions of a seed and a purpose
    trees         nested tuples of tensors: states, messages, uploads
    linalg        inner products and solves that keep their digits
    fingerprint   what a user's object computes, as text
    picture       pictures that look alike
    exits         the exit codes of commands
    stopping      what a signal does to a command
"""
