"""Built-in local trainers: one short file a method; ``base`` has their contract, ``loop`` the only training loop."""
