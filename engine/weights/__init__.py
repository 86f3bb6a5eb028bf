"""Reads model files: metadata and tensors, with one clear error for every way a file can be wrong."""
