"""Memory of a running model, known from its spec before anything is loaded."""
