"""Adapters for transformers."""
