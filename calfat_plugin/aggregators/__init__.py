"""Built-in aggregators: how a server combines the updates of a round's clients."""
