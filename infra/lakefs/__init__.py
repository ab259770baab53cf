"""The real lakeFS server: its Go module and configuration, how it is built, and how it is run on loopback."""
