"""The APIs: a file each, which reads bodies and writes answers."""
