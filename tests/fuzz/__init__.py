"""Generated requests against the example: ``python3 dev.py fuzz``."""
