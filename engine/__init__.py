"""Runs models: weights, models, attention, sampling, devices, behind the one interface of ``engine.base``."""
