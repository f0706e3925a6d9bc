"""Tests of flask-idempotency."""
