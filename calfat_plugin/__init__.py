"""Federated adversarial training as plugins for FedML."""

__version__ = "0.1.0"
