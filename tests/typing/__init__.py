"""See CONTRIBUTING.md for what belongs here."""
