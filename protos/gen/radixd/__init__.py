"""Generated from protos/: the wire contract."""
