"""Algorithms that use curvature in other ways than FedSSO; one paper, one file.

What they do, by file:

    giant, done, localnewton   clients solve Newton systems with products of their Hessians
    dane, feddane, fednew      clients solve problems that are tilted to the global one
    fednl, fedpm               Hessians, or compressed differences of them, are sent
    fedsophia                  a diagonal of the curvature at the clients
    anderson                   the server extrapolates from its last rounds
"""
