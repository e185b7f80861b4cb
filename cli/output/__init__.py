"""The output of commands: the console, tables, results, progress, help, failures in words."""
