"""Attacks on finished models: of runs, and of tensors in memory."""
