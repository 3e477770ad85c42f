"""Arithmetic that several packages use: attacks, losses, averages, metrics. Tensors in, tensors out."""
