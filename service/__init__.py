"""The gRPC service and its command line."""
