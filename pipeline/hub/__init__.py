"""Models on the Hugging Face Hub: fetched, checked before their weights arrive, published."""
