"""Regressions over hospitals: coefficients with standard errors, while all rows stay at home.

What a hospital runs needs numpy alone, and never torch: `schema` and `design` turn its table into
numbers, `families` know the likelihood, `limits` say what it refuses to tell, and `hospital`
answers the server's questions. The server's part is in `fit` and `rounds` (FedSSO, to a tolerance),
`inference` (standard errors) and `result` (the table that one publishes). `questions` is all that
travels.
"""
