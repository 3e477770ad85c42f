"""Built-in evaluators. ``measure`` runs any set of evaluators on a model with one shared clean pass."""
