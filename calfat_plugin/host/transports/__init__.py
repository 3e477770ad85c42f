"""How messages travel between processes: gRPC, MQTT with an S3 store."""
