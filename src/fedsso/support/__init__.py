"""What every other package stands on: files, locks, checksums, randomness and trees of tensors."""
