"""Built-in aggregators: thin classes over ``averaging``."""
