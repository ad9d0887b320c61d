"""The ways to read blocks of another host: gRPC and UCX, and which one is used."""
