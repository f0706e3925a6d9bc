"""Tests of ``celery_integration``."""
