"""Options: validated on construction, stored as JSON, shown as forms."""
