"""Generated from protos/radixd/v1."""
