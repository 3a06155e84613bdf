"""Algorithms whose clients use gradients alone; one paper, one file.

What they try, by file:

    fedavg, fedsgd          the baselines
    fedprox, scaffold       against the drift of unequal clients
    fednova                 against unequal numbers of local steps
    fedopt, fedac, stem     momentum, adaptive steps, acceleration, variance reduction
    fedexp, fedacg, diloco  other steps of the server: extrapolation, momentum ahead, Nesterov's
    serverlion, servermuon  other steps of the server: signs, orthogonal matrices
    fedvarp, mifa           against absence: the server remembers every client's last update
    ldsgd                   several averages in a round
    fedper                  a model for each client
"""
