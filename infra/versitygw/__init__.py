"""An S3 gateway over a folder: its Go module, how it is built, and how it is run on loopback."""
