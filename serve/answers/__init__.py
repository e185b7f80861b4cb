"""Fields that a request may have and an answer holds, whatever API it came by."""
