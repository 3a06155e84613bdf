"""A regression over hospitals that Flower connects: what each side of `regression.questions` runs.

    client.hospital_app    the ClientApp of a hospital, which answers questions about its table
    own.settings           what a hospital has set for itself: its table, its name, its limits
    server.Nodes           asks all hospitals a question, for `fedsso.regression.fit`
    records                questions and answers as Flower's records

A hospital loads numpy and Flower, and never torch: every message starts a Python process there.
"""
