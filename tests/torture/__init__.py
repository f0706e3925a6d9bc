"""Slow proofs that try to break the store: ``python3 dev.py torture``."""
