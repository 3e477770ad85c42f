"""Built-in loss modifiers: changes to a method's losses that compose with many methods."""
