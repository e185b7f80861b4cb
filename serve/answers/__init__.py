"""What a request may ask for and what an answer holds, whatever API it came by."""
