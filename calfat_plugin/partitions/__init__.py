"""Who holds which training examples."""
