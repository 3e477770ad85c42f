"""Run directories: everything that a run leaves behind, and going on where one stopped."""
