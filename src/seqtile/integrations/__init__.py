"""Integrations with trainers and frameworks."""
