"""Everything that leaves this package with a trained model: its files, its card, and where it comes from."""
