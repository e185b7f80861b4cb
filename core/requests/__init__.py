"""Requests for generated text, and conversations."""
