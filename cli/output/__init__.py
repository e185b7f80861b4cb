"""What commands print: the console, tables, results, progress, help, failures in words."""
