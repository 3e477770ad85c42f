"""How messages travel between processes: gRPC, MPI, MQTT with an S3 store."""
