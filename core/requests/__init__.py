"""What callers want generated: requests and conversations."""
