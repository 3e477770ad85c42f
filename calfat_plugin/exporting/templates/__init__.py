"""The Markdown of cards."""
