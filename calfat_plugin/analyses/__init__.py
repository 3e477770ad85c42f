"""What loads a model after its run: attacks, per-class comparison, t-SNE."""
