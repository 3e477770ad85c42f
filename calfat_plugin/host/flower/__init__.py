"""Flower as the host: its engine runs the rounds, and calls the parties of :mod:`calfat_plugin.federation`."""
