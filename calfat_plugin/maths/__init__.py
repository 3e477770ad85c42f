"""Arithmetic that several rooms share: attacks, losses, averages, metrics. Tensors in, tensors out."""
