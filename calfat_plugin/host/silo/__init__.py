"""Cross-silo runs: one process for each party, on the host's own managers."""
