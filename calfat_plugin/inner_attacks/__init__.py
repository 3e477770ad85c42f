"""Built-in inner attacks: how training looks for the images that a method trains on."""
