"""Tokenizers and chat templates, and text from ids that arrive one at a time."""
