"""Adapters for torchvision."""
