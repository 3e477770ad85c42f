"""Built-in attackers: clients that send what harms the others, in simulations."""
