"""End-to-end tests; a package, so that fixtures can last as long as they do."""
