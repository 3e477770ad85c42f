"""The two parties of a federation, without a runtime: a host only carries messages between them."""
