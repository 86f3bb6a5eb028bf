"""The model architectures, one file each, and the registry that finds one by its name."""
