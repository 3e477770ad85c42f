"""Whether a robust accuracy may be believed: a battery of checks on one finished model, and a verdict in words."""
