"""FedML as the runtime. Nothing outside this package imports fedml."""
