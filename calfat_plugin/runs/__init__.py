"""Run directories: everything that a run writes, and how a stopped one is resumed."""
