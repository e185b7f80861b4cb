"""The HTTP side: the application, its guard, its pages, its sockets."""
