"""Files, locks, checksums, randomness and trees of tensors: what every other room stands on."""
